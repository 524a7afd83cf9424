"""Many runs side by side, each in a process that stays for the next one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from studies.proving.runner import Case, run_case
from studies.proving.scores import Score
from studies.proving.truth import Optimum


@dataclass(frozen=True)
class Job:
    """One run and what it is judged by."""

    case: Case
    optimum: Optimum
    checkpoints: tuple[int, ...]

    def score(self) -> Score:
        """Run it."""
        return Score.of(self.case, run_case(self.case, self.checkpoints), self.optimum)


_JOBS_AT_ONCE = 26
"""Given to a process: its table goes along once for all of them."""


def scores_of(jobs: Sequence[Job], num_processes: int) -> Iterator[Score]:
    """Every job's, in order; in this process where one is asked for. Jobs of one model should follow each other: a
    process keeps what it worked out of the latest table."""
    if num_processes == 1:
        yield from map(Job.score, jobs)
        return
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), _one_thread) as pool:
        yield from pool.map(Job.score, jobs, chunksize=_JOBS_AT_ONCE)


def _one_thread() -> None:
    """Processes side by side must not share their cores' time with each other's threads."""
    torch.set_num_threads(1)
