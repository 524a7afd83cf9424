"""python -m studies.scaling.run: trials per hour and what the storage costs, for 1 to 32 workers; no model, no GPU.

A trial sleeps for a fixed time where a real one measures, proposes and writes what a real one does, and is proposed by
the local sampler with the workers' claims, each worker in a process of its own. Starts PostgreSQL by itself. Writes
results.json and table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna

from layerskip.command_line.cli import OneLineParser, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.machine.host import cpu_name, git_commit, package_version
from search.storages.opening import close_storage, open_storage
from search.study.leaderboard import make_standings
from search.study.opening import quiet_optuna
from search.study.trials import counted
from studies.scaling.landscape import NOISE, NUM_PROMPTS, SPACE, Landscape
from studies.scaling.servers import ROOT, PostgresServer, child_environment, own_postgres, own_proxy
from studies.scaling.tables import make_tables
from studies.scaling.worker import Job

PROG = "studies.scaling.run"
_MOST_ON_SQLITE = 8
_STORAGES = ("sqlite", "postgres", "proxy")
_QUALITY_TRIALS = 64
_QUALITY_SECONDS = 0.2
"""Per trial: long enough for all workers to be measuring at once."""


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, nargs="+", default=[5.0], help="a trial takes, measuring")
    parser.add_argument("--storages", nargs="+", choices=_STORAGES, default=list(_STORAGES))
    parser.add_argument("--trials-per-worker", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2, help="studies per number of workers, for the quality")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    quiet_optuna()
    start = time.monotonic()
    with own_postgres(durable=True) as server, workers(max(arguments.workers)) as pool:
        speed = [
            measure(server, pool, storage, num_workers, seconds, arguments.trials_per_worker)
            for storage in arguments.storages
            for seconds in arguments.seconds
            for num_workers in arguments.workers
            if storage != "sqlite" or num_workers <= _MOST_ON_SQLITE
        ]
        quality = [search(server, pool, num_workers, arguments.seeds) for num_workers in arguments.workers]
    results = {
        "command": f"python -m {PROG}",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "versions": {name: package_version(name) for name in ("optuna", "sqlalchemy", "psycopg", "grpcio")},
        "commit": git_commit(ROOT),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "parameters": len(SPACE.distributions),
        "speed": speed,
        "quality": quality,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(arguments.out / "table.md", make_tables(results))
    _say(f"written {arguments.out / 'results.json'} and table.md")
    return 0


class Worker:
    """One worker process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "studies.scaling.worker"]
        self._process = subprocess.Popen(
            command, env=child_environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        """A line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """A line of its stdout. Raises: RuntimeError if it has died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with code {self._process.wait()}")
        return line

    def end(self) -> None:
        """Wait for its end."""
        self._process.communicate()


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    """Processes that have imported everything before anything is timed."""
    pool = [Worker() for _ in range(count)]
    try:
        yield pool
    finally:
        for worker in pool:
            worker.end()


def do(job: Job, pool: Sequence[Worker]) -> list[dict[str, Any]]:
    """The job by all these workers at once; what each tells of itself."""
    for worker in pool:
        worker.tell(json.dumps(asdict(job)))
    for worker in pool:
        worker.hear()
    for worker in pool:
        worker.tell("go")
    return [json.loads(worker.hear()) for worker in pool]


def measure(
    server: PostgresServer, pool: Sequence[Worker], storage: str, num_workers: int, seconds: float, per_worker: int
) -> dict[str, Any]:
    """Trials per hour of one number of workers on one storage, and where the time goes."""
    total = num_workers * per_worker
    with fresh_storage(server, storage) as url:
        told = do(Job(url, "speed", seconds, total, seed=0), pool[:num_workers])
    took_s = max(one["end"] for one in told) - min(one["start"] for one in told)
    trials = sum(one["trials"] for one in told)
    row = {
        "storage": storage,
        "trial_seconds": seconds,
        "workers": num_workers,
        "trials": trials,
        "seconds": took_s,
        "trials_per_hour": 3600 * trials / took_s,
        "efficiency": trials * seconds / took_s / num_workers,
        "storage_s_per_trial": sum(one["storage_s"] for one in told) / trials,
        "proposing_s_per_trial": sum(one["proposing_s"] for one in told) / trials,
    }
    _say(f"{storage}, trials of {seconds:g} s, {num_workers} workers: {row['trials_per_hour']:.0f} trials/h")
    return row


def search(server: PostgresServer, pool: Sequence[Worker], num_workers: int, num_seeds: int) -> dict[str, Any]:
    """How good the leader of studies of equally many trials truly is, as a share of the optimum."""
    shares = []
    for seed in range(num_seeds):
        with fresh_storage(server, "postgres") as url:
            do(Job(url, "quality", _QUALITY_SECONDS, _QUALITY_TRIALS, seed), pool[:num_workers])
            storage = open_storage(url)
            trials = optuna.load_study(study_name="quality", storage=storage).get_trials(deepcopy=False)
            close_storage(storage)
        if counted(trials) != _QUALITY_TRIALS:
            raise RuntimeError(f"{counted(trials)} trials, expected {_QUALITY_TRIALS}")
        leader = make_standings(trials, SPACE, NOISE, NUM_PROMPTS).leader
        landscape = Landscape(seed)
        shares.append(landscape.speedup(leader.config) / landscape.optimum() if leader else 0.0)
    _say(f"{num_workers} workers, {_QUALITY_TRIALS} trials: {sum(shares) / len(shares):.3f} of the optimum")
    return {"workers": num_workers, "trials": _QUALITY_TRIALS, "share_of_optimum": shares}


@contextmanager
def fresh_storage(server: PostgresServer, storage: str) -> Iterator[str]:
    """The URL of an empty storage."""
    with ExitStack() as stack:
        if storage == "sqlite":
            yield f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/study.db"
        elif storage == "postgres":
            yield server.new_database()
        else:
            yield stack.enter_context(own_proxy(server.new_database())).url


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
