"""Chaos: workers on one study are killed at random moments, then the study is audited. On any storage."""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import DecodeConfig
from search.storages.address import storage_file
from search.storages.opening import close_storage, open_storage
from search.study.attributes import ATTEMPT, CLAIM, FAILURE, RETRY_OF
from search.study.config_words import describe
from search.study.trials import WORKER_DIED, counted, key_of, was_interrupted
from search.workers.reaping import MAX_ATTEMPTS
from studies.scaling.servers import NoServer, own_postgres
from tests.search.helpers.crew_member import TIMELINE, Order, start
from tests.search.helpers.fakes import SPACE

COMPLETE_ATTRIBUTES = {
    *("process", "worker", "claim", "origin", "skip_mask", "speedup", "stopped_early", "lossless", "num_prompts"),
    *("prompt_steps", "ratios", "forwards", "draft_s", "verify_s", "seconds", "acceptance_rate"),
}


def kill_at_random(order: Order, *, kills: int, num_workers: int, seed: int, most_s: float = 0.3) -> None:
    """Keep so many workers at it, kill one after the other at random moments, and let the last ones finish.

    A moment comes only once a trial has been begun since the last one, or the kills would all hit processes that start.
    """
    rng = random.Random(seed)
    workers = [start(order) for _ in range(num_workers)]
    storage = open_storage(order.storage)
    begun = 0
    try:
        for _ in range(kills):
            before = begun
            while begun <= before and any(worker.is_alive() for worker in workers):
                time.sleep(0.02)
                begun = _num_begun(storage, order)
            time.sleep(rng.uniform(0.0, most_s))
            begun = _num_begun(storage, order)
            victim = rng.randrange(num_workers)
            workers[victim].kill()  # no harm if it has come to its end
            workers[victim].join()
            workers[victim] = start(order)
        _finish(workers)
    finally:
        for worker in workers:
            worker.kill()
        close_storage(storage)


def _num_begun(storage: BaseStorage, order: Order) -> int:
    try:
        study_id = storage.get_study_id_from_name(order.study_name)
    except KeyError:
        return 0
    return len(storage.get_all_trials(study_id, deepcopy=False))


def _finish(workers: list[ForkServerProcess]) -> None:
    for worker in workers:
        worker.join(timeout=300)
        if worker.exitcode is None:
            worker.kill()
    codes = [worker.exitcode for worker in workers]
    assert codes == [0] * len(workers), f"exit codes of the workers that nobody killed: {codes}"


def audit(order: Order) -> dict[str, int]:
    """Whether the study is whole; AssertionError names what is not. Returns what there was."""
    storage = open_storage(order.storage)
    try:
        names = optuna.get_all_study_names(storage)
        study = optuna.load_study(study_name=order.study_name, storage=storage)
        trials = study.get_trials()
        facts = _audit_trials(trials, order.trials)
        _audit_overlaps(trials, order.folder / TIMELINE, _num_confirm_stages(order.folder / order.log))
        leases = [name for name in names if name.startswith(f"{order.study_name}/lease")]
        assert not leases, f"leases left behind: {leases}"
        assert study.user_attrs.get("verdict") in ("speculate", "do not speculate")
    finally:
        close_storage(storage)
    assert DecodeConfig.load(order.folder / "best.json").provenance is not None
    file = storage_file(order.storage)
    if file is not None and order.storage.startswith("sqlite"):
        with sqlite3.connect(file) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return facts


def _audit_trials(trials: list[FrozenTrial], total: int) -> dict[str, int]:
    states = Counter(trial.state.name for trial in trials)
    assert set(states) <= {"COMPLETE", "FAIL"}, f"trials that are not finished: {states}"
    assert counted(trials) == total, f"{counted(trials)} trials counted, {total} asked for"
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    for trial in complete:
        missing = COMPLETE_ATTRIBUTES - trial.user_attrs.keys()
        assert not missing, f"trial {trial.number} lacks {missing}"
        assert trial.value is not None
        assert trial.value > 0
        assert len(trial.user_attrs["ratios"]) == trial.user_attrs["num_prompts"] == len(trial.intermediate_values)
        assert key_of(trial.user_attrs[CLAIM]) == key_of(trial.params), f"trial {trial.number} measured another config"
    _audit_retries(trials)
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    died = sum(trial.user_attrs.get(FAILURE, WORKER_DIED).startswith(WORKER_DIED) for trial in failed)
    return {"trials": len(trials), "complete": len(complete), "died": died}


def _audit_retries(trials: list[FrozenTrial]) -> None:
    retries = Counter(trial.user_attrs[RETRY_OF] for trial in trials if RETRY_OF in trial.user_attrs)
    assert not [number for number, count in retries.items() if count > 1], f"queued again more than once: {retries}"
    by_number = {trial.number: trial for trial in trials}
    for trial in trials:
        attempt = trial.user_attrs.get(ATTEMPT, 1)
        assert attempt <= MAX_ATTEMPTS
        lost = trial.state == TrialState.FAIL and was_interrupted(trial) and CLAIM in trial.user_attrs
        if lost and not trial.user_attrs.get(FAILURE, "").startswith("withdrawn"):
            assert trial.number in retries, f"trial {trial.number} was lost: {trial.user_attrs.get(FAILURE)}"
        if RETRY_OF in trial.user_attrs and CLAIM in by_number[trial.user_attrs[RETRY_OF]].user_attrs:
            claim = by_number[trial.user_attrs[RETRY_OF]].user_attrs[CLAIM]
            # Some of them, where the worker was killed while it wrote them down one by one.
            other = trial.params.items() - claim.items()
            assert not other, f"trial {trial.number} has other parameters than the one that it repeats: {other}"


def _num_confirm_stages(log: Path) -> int:
    """How many were begun: where a worker is killed in one, another begins it again."""
    return log.read_text(encoding="utf-8").count(" candidates and plain decoding on ")


def _audit_overlaps(trials: list[FrozenTrial], timeline: Path, num_confirm_stages: int) -> None:
    """No config was measured by two live workers at once: each trial's decodings are one block in the order of time.

    So there are no more blocks of a config than trials of it, and one of each confirm stage.
    """
    most: Counter[str] = Counter()
    for trial in trials:
        if CLAIM in trial.user_attrs:
            most[describe(SPACE.to_config(trial.user_attrs[CLAIM]))] += 1
    blocks: Counter[str] = Counter()
    latest: dict[str, str] = {}
    for line in timeline.read_text(encoding="utf-8").splitlines():
        worker, _, config = line.partition(" ")
        blocks[config] += latest.get(config) != worker
        latest[config] = worker
    for config, count in blocks.items():
        most_blocks = most[config] + num_confirm_stages
        assert count <= most_blocks, f"{config}: {count} blocks, {most[config]} trials, {num_confirm_stages} confirms"


def main() -> None:
    """Kill workers at random, then audit the study. Without --storage, on SQLite in a temporary folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.chaos", description=main.__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--storage", metavar="URL")
    where.add_argument("--postgres", action="store_true", help="on a PostgreSQL server of its own")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        storage = given.storage or f"sqlite:///{folder / 'study.db'}"
        if given.postgres:
            try:
                storage = stack.enter_context(own_postgres(durable=False)).new_database()
            except NoServer as missing:
                parser.error(str(missing))
        order = Order(folder, storage, study_name=f"chaos-{given.seed}", trials=given.trials)
        kill_at_random(order, kills=given.kills, num_workers=given.workers, seed=given.seed)
        print(f"{given.kills} kills, seed {given.seed}: {audit(order)}")


if __name__ == "__main__":
    main()
