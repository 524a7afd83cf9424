"""Many runs side by side, each in a process that stays for the next one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

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


T = TypeVar("T")
_ALLOCATIONS = 100_000
"""Between two searches for garbage."""
_JOBS_AT_ONCE = 26
"""Given to a process: their table goes along once for all of them."""


def in_turns(jobs: Sequence[T], num_processes: int) -> list[T]:
    """Each process's share, which is a stretch of the list, dealt out in turns: see `scores_of`."""
    size = -(-len(jobs) // num_processes)
    shares = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    return [one for turn in zip_longest(*shares) for one in turn if one is not None]


def scores_of(jobs: Sequence[Job], num_processes: int) -> Iterator[Score]:
    """Every job's, in order; in this process where one is asked for.

    Each process has every so many-th. It keeps what it worked out of its latest table, so these should be of one model
    for long, which `in_turns` sees to.
    """
    if num_processes == 1:
        yield from map(Job.score, jobs)
        return
    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        pools = [stack.enter_context(ProcessPoolExecutor(1, context, _begin_process)) for _ in range(num_processes)]
        each = [pool.map(Job.score, jobs[i::num_processes], chunksize=_JOBS_AT_ONCE) for i, pool in enumerate(pools)]
        for turn in zip_longest(*each):
            yield from (one for one in turn if one is not None)


def _begin_process() -> None:
    """Processes side by side must not share their cores' time with each other's threads, nor outlive who began them.

    Nor look for garbage as often as Python does by itself, which takes a twentieth of the time and finds next to none.
    """
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # even of one that was killed
        os._exit(1)
