"""Several workers on one study: leases, claims, retries, and who confirms."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from layerskip import DecodeConfig
from search.confirm.stored_config import stored_config
from search.outlook.warm_starts import warm_starts
from search.reporting.record import read_record
from search.reporting.verdict import verdict_of
from search.storages.opening import open_storage
from search.study.attributes import ATTEMPT, CLAIM, FAILURE, PROCESS, RETRY_OF
from search.study.fingerprint import FingerprintMismatch
from search.study.opening import quiet_optuna
from search.study.trials import WITHDRAWN, WORKER_DIED, counted, key_of, trials_by_state
from search.trials.proposals import ProposeOptions
from search.trials.sampler import make_sampler
from search.workers.crew import Crew, StudyBusy
from search.workers.heartbeats import Beats, Patience, Witness
from search.workers.lease import Lease
from search.workers.process import is_gone, process_token
from search.workers.reaping import queue_again
from tests.search.chaos import audit
from tests.search.helpers.crew_member import CONTEXT, Order, start
from tests.search.helpers.fakes import FINGERPRINT, SPACE, Bench

ELSEWHERE = "another-host 4711 99"
ENDLESS = Patience(beat_s=0.02, dead_after_s=1e9, nameless_after_s=1e9, poll_s=0.01)
SHORT = Patience(beat_s=0.02, dead_after_s=0.3, nameless_after_s=0.2, poll_s=0.01)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def storage(url: str) -> BaseStorage:
    quiet_optuna()
    return open_storage(url)


@functools.cache
def a_dead_token() -> str:
    """Of a process of this host that has ended."""
    code = "from search.workers.process import process_token; print(process_token())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def make_crew(storage: BaseStorage, patience: Patience = SHORT, **options: Any) -> tuple[Crew, optuna.Study]:
    study = optuna.create_study(storage=storage, study_name="s", direction="maximize", load_if_exists=True)
    crew = Crew(storage, "s", patience=patience, **options)
    with crew.setting_up():
        crew.join(study)
    return crew, study


def running(study: optuna.Study, **attributes: Any) -> int:
    """Number of a new running trial, as another worker would have left it."""
    study.add_trial(optuna.create_trial(state=TrialState.RUNNING, user_attrs=attributes))
    return study.get_trials(deepcopy=False)[-1].number


def ask(study: optuna.Study) -> optuna.Trial:
    """A trial that has its config: Optuna asks the sampler at the first parameter."""
    trial = study.ask()
    SPACE.suggest(trial)
    return trial


def params_of(place: int) -> dict[str, Any]:
    return dict(warm_starts(SPACE)[place].params)


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_token_names_this_process_and_not_another_with_its_pid() -> None:
    token = process_token()
    assert not is_gone(token)
    host, pid, start_time = token.rsplit(" ", 2)
    assert is_gone(f"{host} {pid} {int(start_time) + 1}")
    assert is_gone(a_dead_token())
    for nonsense in ("", "x", "a b c", f"{host} 0 1"):
        assert is_gone(nonsense)


def test_a_zombie_counts_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has asked for its exit code
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[0] == "Z"
    host = process_token().rsplit(" ", 2)[0]
    assert is_gone(f"{host} {process.pid} {fields[19]}")
    process.wait()


def test_a_worker_of_another_host_is_dead_once_its_signs_stop_and_no_clock_of_its_own_counts() -> None:
    now = [0.0]
    witness = Witness(Patience(dead_after_s=300), lambda: now[0])
    assert not witness.is_dead(ELSEWHERE, 5)
    now[0] = 299.0
    assert not witness.is_dead(ELSEWHERE, 5)
    assert not witness.is_sure(ELSEWHERE, 5)
    assert not witness.is_dead(ELSEWHERE, 6)  # a sign
    assert witness.is_sure(ELSEWHERE, 6)
    now[0] = 599.0
    assert not witness.is_dead(ELSEWHERE, 6)
    now[0] = 599.1
    assert witness.is_dead(ELSEWHERE, 6)


# --- leases ----------------------------------------------------------------------------------------------------------


def make_lease(storage: BaseStorage, patience: Patience = SHORT) -> Lease:
    return Lease(storage, "s/lease/test", Beats(storage, patience.beat_s), Witness(patience), patience)


def count_up(url: str, folder: Path, times: int) -> None:
    """Read a number, and write it plus one: only right if nobody does so at the same time."""
    quiet_optuna()
    storage = open_storage(url)
    file = folder / "count"
    for _ in range(times):
        with make_lease(storage, Patience(poll_s=0.005)).held():
            number = int(file.read_text())
            file.write_text(str(number + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["journal", "sqlite", "postgres"])
def test_one_process_at_a_time_holds_a_lease_and_nothing_is_left_of_it(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}" if kind == "sqlite" else f"journal:{tmp_path / 'study.log'}"
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    storage = open_storage(url)
    (tmp_path / "count").write_text("0")
    processes = [CONTEXT.Process(target=count_up, args=(url, tmp_path, 6)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert (tmp_path / "count").read_text() == "18"
    assert optuna.get_all_study_names(storage) == []


def ticket_of(storage: BaseStorage, token: str) -> int:
    """Another process's ticket, before anybody's; returns the trial's id."""
    study = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s/lease/test")
    attrs = {"ticket": "theirs", "process": token, "beat": 0}
    return storage.create_new_trial(study, optuna.create_trial(state=TrialState.RUNNING, user_attrs=attrs))


@pytest.mark.parametrize("make_token", [a_dead_token, lambda: ELSEWHERE], ids=["this host", "another host"])
def test_a_dead_holder_is_passed_over(storage: BaseStorage, make_token: Callable[[], str]) -> None:
    ticket_of(storage, make_token())
    with make_lease(storage).held() as acquired:
        assert acquired
    assert optuna.get_all_study_names(storage) == []


def test_a_live_holder_is_not(storage: BaseStorage, url: str) -> None:
    trial_id = ticket_of(storage, ELSEWHERE)
    looks = []
    their_storage = open_storage(url)

    def wait(holder: str | None) -> bool:
        looks.append(holder)
        their_storage.set_trial_user_attr(trial_id, "beat", len(looks))
        return len(looks) < 60  # twice as long as it would take to be given up

    with make_lease(storage).held(wait) as acquired:
        assert not acquired
    assert set(looks) == {ELSEWHERE}
    assert optuna.get_all_study_names(storage) == ["s/lease/test"]  # theirs still
    storage.set_trial_state_values(trial_id, TrialState.FAIL)
    with make_lease(storage).held() as acquired:
        assert acquired


def test_a_waiting_process_of_another_host_gives_signs_of_life_as_well(storage: BaseStorage, url: str) -> None:
    """Or the next in the queue would take it for dead and go first."""
    holder = make_lease(storage)
    assert holder.acquire(lambda _holder: True)
    other_storage = open_storage(url)
    waiting = make_lease(other_storage)
    beats: list[int] = []
    enough = threading.Event()

    def wait(_holder: str | None) -> bool:
        study_id = other_storage.get_study_id_from_name("s/lease/test")
        beats.append(other_storage.get_all_trials(study_id)[-1].user_attrs["beat"])
        if beats[-1] >= 2:
            enough.set()
        return not enough.is_set()

    # The holder is this very process: nobody is passed over.
    assert not waiting.acquire(wait)
    assert beats[-1] >= 2
    holder.release()


# --- claims ----------------------------------------------------------------------------------------------------------


def test_a_proposal_waits_for_those_before_it_and_takes_the_next_best(storage: BaseStorage) -> None:
    crew, study = make_crew(storage, ENDLESS)
    running(study, process=ELSEWHERE)  # thinking about what to measure
    sampler = make_sampler("tpe", SPACE, ProposeOptions(4, 0.02, 5), None, crew.claims)
    study.sampler = sampler
    asked: list[optuna.Trial] = []
    thread = threading.Thread(target=lambda: asked.append(ask(study)))
    thread.start()
    first = study.get_trials()[0]
    while len(study.get_trials()) < 2:
        pass
    thread.join(timeout=0.1)
    assert thread.is_alive()  # nothing claimed yet
    storage.set_trial_user_attr(first._trial_id, CLAIM, params_of(0))
    thread.join(timeout=30)
    assert key_of(asked[0].study.get_trials()[1].user_attrs[CLAIM]) == key_of(params_of(1))
    assert sampler.proposal_of(1).origin.startswith("warm:")
    crew.leave()


def test_one_that_dies_before_it_claims_keeps_nobody(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    running(study, process=ELSEWHERE)
    running(study)  # has not even said whose it is
    study.sampler = make_sampler("tpe", SPACE, ProposeOptions(4, 0.02, 5), None, crew.claims)
    ask(study)
    assert key_of(study.get_trials()[2].user_attrs[CLAIM]) == key_of(params_of(0))
    crew.leave()


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_no_two_open_trials_share_a_config_and_no_seed_is_used_twice(storage: BaseStorage, name: Any) -> None:
    crew, study = make_crew(storage)
    study.sampler = make_sampler(name, SPACE, ProposeOptions(0, 0.02, 5), None, crew.claims)
    num = len(warm_starts(SPACE)) + 6
    for _ in range(num):
        ask(study)
    keys = [key_of(trial.user_attrs[CLAIM]) for trial in study.get_trials()]
    assert len(set(keys)) == num
    crew.leave()


def test_a_leader_that_somebody_measures_again_is_left_to_them(bench: Bench) -> None:
    bench.run(trials=15)
    study = bench.study()
    repeated = []
    for _ in range(2):
        sampler = make_sampler("tpe", SPACE, ProposeOptions(1, 0.02, 5), None)
        study.sampler = sampler
        trial = ask(study)
        proposal = sampler.proposal_of(trial.number)
        assert proposal.origin == "repeat"
        assert proposal.params is not None
        repeated.append(key_of(proposal.params))
        trial.set_user_attr(CLAIM, proposal.params)
    assert repeated[0] != repeated[1]


def test_the_last_trial_is_begun_once(storage: BaseStorage) -> None:
    crew, study = make_crew(storage, ENDLESS)
    running(study, process=ELSEWHERE, claim=params_of(0))
    assert crew.may_begin(2)
    assert not crew.may_begin(1)
    sampler = make_sampler("tpe", SPACE, ProposeOptions(4, 0.02, 5), None, crew.claims)
    study.sampler = sampler
    study.ask()
    assert sampler.is_surplus  # somebody else was faster: the total is 1
    assert CLAIM not in study.get_trials()[1].user_attrs
    crew.leave()


# --- what the dead leave ---------------------------------------------------------------------------------------------


def test_a_dead_workers_trial_is_failed_with_the_reason_and_queued_twice(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    token = a_dead_token()
    number = running(study, process=token, claim=params_of(3), origin="warm:x", speedup=9.9)
    for attempt in (2, 3):
        assert [one.is_queued for one in crew.sweep()] == [True]
        dead, queued = study.get_trials()[-2:]
        assert (dead.state, dead.user_attrs[FAILURE]) == (TrialState.FAIL, WORKER_DIED)
        assert queued.state == TrialState.WAITING
        assert queued.user_attrs == {RETRY_OF: number, ATTEMPT: attempt, "origin": "warm:x"}  # none of its numbers
        study.sampler = make_sampler("tpe", SPACE, ProposeOptions(4, 0.02, 5), None, crew.claims)
        trial = study.ask()
        SPACE.suggest(trial)
        assert trial.params == params_of(3)
        number = trial.number
        trial.set_user_attr(PROCESS, token)  # this one dies as well
    assert [one.is_queued for one in crew.sweep()] == [False]
    last = study.get_trials()[-1]
    assert (last.state, last.user_attrs[FAILURE]) == (TrialState.FAIL, "worker died, 3 times with this config")
    assert counted(study.get_trials()) == 1  # the config's own failure, in the end
    assert trials_by_state(study.get_trials()) == {
        "measured": 0, "stopped_early": 0, "not_lossless": 0, "failed": 1, "interrupted": 2,
    }  # fmt: skip
    assert crew.sweep() == []
    crew.leave()


def test_one_that_died_before_it_chose_is_failed_and_nothing_is_queued(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    running(study, process=a_dead_token())
    running(study)
    assert [one.is_queued for one in crew.sweep()] == [False, False]
    assert [trial.state for trial in study.get_trials()] == [TrialState.FAIL] * 2
    crew.leave()


def test_a_reaper_that_dies_between_queueing_and_failing_queues_nothing_twice(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    running(study, process=a_dead_token(), claim=params_of(3))
    queue_again(study, study.get_trials()[0], attempt=2)
    crew.sweep()
    assert [trial.state for trial in study.get_trials()] == [TrialState.FAIL, TrialState.WAITING]
    crew.leave()


def test_what_failed_without_a_reason_is_queued_as_well(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    number = running(study, process=ELSEWHERE, claim=params_of(3))
    study.tell(number, state=TrialState.FAIL)  # says no reason, and Optuna's own retry would keep its constraints
    assert len(crew.sweep()) == 1
    assert study.get_trials()[-1].user_attrs == {RETRY_OF: number, ATTEMPT: 2}
    assert crew.sweep() == []
    crew.leave()


def test_trials_of_another_host_are_left_alone_as_long_as_it_gives_signs_of_life(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    running(study, process=ELSEWHERE, claim=params_of(3))
    study_id = storage.get_study_id_from_name("s")
    entry = {"number": 1, "process": ELSEWHERE, "stage": "search", "beat": 0, "facts": {}}
    start = time.monotonic()
    beat = 0
    while time.monotonic() < start + 2 * SHORT.dead_after_s:  # longer than it takes to be given up
        beat += 1
        storage.set_study_user_attr(study_id, "worker.01", entry | {"beat": beat})
        assert crew.sweep() == []
    while not crew.sweep():
        pass
    assert study.get_trials()[0].user_attrs[FAILURE] == WORKER_DIED
    crew.leave()


# --- the roster, and the end -----------------------------------------------------------------------------------------


def enter_elsewhere(storage: BaseStorage, *, key: str = "worker.01", **changes: Any) -> None:
    entry = {"number": 1, "process": ELSEWHERE, "stage": "search", "beat": 0, "facts": {}}
    storage.set_study_user_attr(storage.get_study_id_from_name("s"), key, entry | changes)


def test_numbers_are_given_out_again(storage: BaseStorage) -> None:
    crew, study = make_crew(storage, ENDLESS)
    assert study.user_attrs["worker.00"]["process"] == process_token()
    crew.leave()
    assert study.user_attrs["worker.00"]["stage"] == "left"
    enter_elsewhere(storage)
    crew, study = make_crew(storage, ENDLESS)
    assert crew.roster.number == 0
    assert crew.is_first()
    crew.leave()
    enter_elsewhere(storage, number=0, key="worker.00")
    crew, study = make_crew(storage, ENDLESS)
    assert crew.roster.number == 2
    assert not crew.is_first()
    crew.leave()


def test_what_a_dead_process_left_of_a_lease_is_taken_away_by_whoever_leaves(storage: BaseStorage) -> None:
    crew, study = make_crew(storage)
    theirs = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s/lease/reap")
    attrs = {"ticket": "theirs", "process": a_dead_token(), "beat": 0}
    storage.create_new_trial(theirs, optuna.create_trial(state=TrialState.RUNNING, user_attrs=attrs))
    crew.leave()
    assert optuna.get_all_study_names(storage) == [study.study_name]


def test_the_last_one_out_confirms(storage: BaseStorage) -> None:
    crew, _study = make_crew(storage, ENDLESS)
    enter_elsewhere(storage, beat=1)
    assert not crew.roster.is_heard(crew.roster.others()[0])
    enter_elsewhere(storage, beat=2)
    said = crew.finish()
    assert said is not None
    assert "goes on; the last one confirms" in said
    enter_elsewhere(storage, stage="confirm", beat=3)
    said = crew.finish()
    assert said.endswith("confirms")
    enter_elsewhere(storage, stage="left", beat=4)
    assert crew.finish() is None
    crew.leave()


def test_a_silent_worker_of_another_host_keeps_nobody_from_confirming_for_ever(storage: BaseStorage) -> None:
    told: list[str] = []
    crew, _study = make_crew(storage, tell=told.append)
    enter_elsewhere(storage)
    assert crew.finish() is None
    assert told == ["waiting for a sign of life of worker 1 (process 4711 on another-host)"]
    crew.leave()


def test_whoever_comes_out_after_the_results_are_written_does_not_confirm_again(storage: BaseStorage) -> None:
    crew, _study = make_crew(storage)
    crew.confirmed()  # by another worker, since this one has joined
    assert crew.finish() == "another worker has confirmed"
    crew.leave()
    later, _study = make_crew(storage)
    assert later.finish() is None
    later.leave()


def test_a_worker_that_was_taken_for_dead_notices(storage: BaseStorage) -> None:
    warned: list[str] = []
    crew, study = make_crew(storage, warn=warned.append)
    theirs = {"number": 0, "process": ELSEWHERE, "stage": "search", "beat": 7, "facts": {}}
    while not crew.roster.is_lost:  # a sign of life that was under way may be written over the first one of theirs
        storage.set_study_user_attr(storage.get_study_id_from_name("s"), "worker.00", theirs)
    crew.rejoin_if_lost()
    assert crew.roster.number == 1
    assert study.user_attrs["worker.00"] == theirs
    assert "taken" in warned[0] or "took" in warned[0]
    crew.leave()


def test_a_trial_that_others_failed_meanwhile_does_not_end_the_search(bench: Bench) -> None:
    """As after a laptop's sleep: the trial is somebody else's by now."""
    url = bench.url
    others = open_storage(url)

    def fail_it(_config: DecodeConfig) -> None:
        if bench.decoder.num_decoded == 100:
            study = optuna.load_study(study_name=bench.folder.name, storage=others)
            trial = study.get_trials(states=(TrialState.RUNNING,))[0]
            queue_again(study, trial, attempt=2)
            others.set_trial_user_attr(trial._trial_id, FAILURE, WORKER_DIED)
            others.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    bench.decoder.break_on = fail_it
    assert bench.run(trials=12) == 0
    trials = bench.trials()
    assert counted(trials) == 12
    assert [trial.user_attrs[FAILURE] for trial in trials if trial.state == TrialState.FAIL] == [WORKER_DIED]
    assert "came too late" in bench.output.getvalue()


def test_a_search_per_group_takes_one_worker(storage: BaseStorage) -> None:
    study = optuna.create_study(storage=storage, study_name="s", direction="maximize")
    enter_elsewhere(storage)
    crew = Crew(storage, "s", patience=ENDLESS)
    theirs = Beats(storage, 0.02)
    theirs.keep("theirs", lambda count: enter_elsewhere(storage, beat=count))
    with crew.setting_up(), pytest.raises(StudyBusy, match="takes one worker"):
        crew.join(study, alone=True)
    crew.leave()
    theirs.stop()


# --- whole searches --------------------------------------------------------------------------------------------------


def log_of(order: Order) -> str:
    return (order.folder / order.log).read_text()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("journal", marks=pytest.mark.slow)])
def test_workers_share_one_study_and_its_total(tmp_path: Path, kind: str) -> None:
    file = "study.db" if kind == "sqlite" else "study.log"
    storage = f"{'sqlite:///' if kind == 'sqlite' else 'journal:'}{tmp_path / file}"
    sampler = "replay" if kind == "sqlite" else "tpe"
    order = Order(tmp_path, storage, study_name=tmp_path.name, trials=24, sampler=sampler, pause_s=0.002)
    workers = [start(order) for _ in range(3)]
    for worker in workers:
        worker.join(timeout=300)
    assert [worker.exitcode for worker in workers] == [0, 0, 0], log_of(order)
    audit(order)
    trials = optuna.load_study(study_name=order.study_name, storage=open_storage(storage)).get_trials()
    measured = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len({trial.user_attrs["process"] for trial in measured}) > 1, "one worker did it all"
    origins = Counter(trial.user_attrs["origin"] for trial in measured)
    assert all(count == 1 for origin, count in origins.items() if origin.startswith("warm:"))
    log = log_of(order)
    assert log.count("plain decoding of tuning prompts") == 1  # set up once
    assert log.count("speculate: mask") == 1  # confirmed once
    assert {trial.user_attrs[FAILURE] for trial in trials if trial.state == TrialState.FAIL} <= {WITHDRAWN}


def test_a_worker_with_another_device_is_refused(bench: Bench) -> None:
    bench.run(trials=3)
    with pytest.raises(FingerprintMismatch, match="device was 'cpu', now 'cuda'"):
        bench.run(trials=6, fingerprint=dataclasses.replace(FINGERPRINT, device="cuda"))
    assert optuna.get_all_study_names(open_storage(bench.url)) == [bench.folder.name]


def test_unlike_devices_share_a_study_only_for_the_speedup(bench: Bench) -> None:
    """Each with its own plain speed; a trial's value is the ratio, which compares across them."""
    order = {"objective": "speedup", "sampler": "replay"}
    first = dataclasses.replace(FINGERPRINT, objective="speedup")
    assert bench.run(fingerprint=first, trials=8, **order) == 0
    other = Bench(bench.folder)
    other.decoder.pace = 3.0  # a faster device
    elsewhere = dataclasses.replace(first, device="cuda", num_threads=4)
    assert other.run(fingerprint=elsewhere, trials=16, **order) == 0
    trials = bench.trials()
    assert counted(trials) == 16
    for trial in trials:
        attrs = trial.user_attrs
        assert trial.value == pytest.approx(attrs["speedup"], rel=2e-3)  # a hair less where it was stopped early
        assert attrs["plain_tokens_per_s"] == pytest.approx(100.0 if trial.number < 8 else 300.0, rel=0.05)
        assert attrs["tokens_per_s"] == pytest.approx(attrs["speedup"] * attrs["plain_tokens_per_s"])
    study = bench.study()
    assert study.metric_names == ["speedup"]
    assert study.user_attrs["plain_tokens_per_s"] == pytest.approx(100.0, rel=0.05)
    assert "plain decoding of tuning prompts" in other.output.getvalue()  # its own baseline
    best = DecodeConfig.load(bench.paths.best)
    assert best.confirmed.plain_tokens_per_s == pytest.approx(300.0, rel=0.05)  # where it was confirmed
    again = stored_config(study, open_storage(bench.url), bench.folder)
    assert (best.provenance.device, best.provenance.num_threads) == ("cuda", 4)
    assert (again.provenance.device, again.provenance.num_threads) == ("cuda", 4)
    assert " on cuda, " in verdict_of(read_record(study))[1]
    with pytest.raises(FingerprintMismatch, match="weights was 'abc', now 'other'"):
        Bench(bench.folder).run(fingerprint=dataclasses.replace(elsewhere, weights="other"), trials=17, **order)
    with pytest.raises(FingerprintMismatch, match="objective was 'speedup', now 'tokens_per_s'"):
        Bench(bench.folder).run(trials=17)


def test_workers_on_the_same_cores_are_told_and_their_trials_marked(storage: BaseStorage) -> None:
    warned: list[str] = []
    study = optuna.create_study(storage=storage, study_name="s", direction="maximize")
    process = subprocess.Popen([sys.executable, "-c", TOKEN_AND_WAIT], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    theirs = process.stdout.readline().decode().strip()
    try:
        enter_elsewhere(storage, process=theirs, facts={"cores": [0, 1]})
        crew = Crew(storage, "s", warn=warned.append, facts={"cores": [1, 2]}, patience=SHORT)
        with crew.setting_up():
            crew.join(study)
        crew.claims.begin(running(study))
        crew.leave()
    finally:
        process.communicate(b"end\n")
    assert study.get_trials()[0].user_attrs["shares_device"] == [1]
    assert "computes on the same device" in warned[0]


TOKEN_AND_WAIT = """
from search.workers.process import process_token
print(process_token(), flush=True)
input()
"""
