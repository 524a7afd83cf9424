"""How many CPU threads decoding is fastest with here, by measurement: all cores are often not it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from layerskip.machine.host import threads_are_fixed

NUM_STEPS = 4
"""Plain steps that are timed beside one verification of this many drafts and one token: a mix like a round's."""
_TEXT = (1,) * 64
_PASSES = 7
_LONGEST_S = 10.0
_TIE = 1.05
"""Fewer threads are taken if they are at most so much slower: they leave cores to others and vary less."""


@dataclass(frozen=True)
class ThreadChoice:
    """The number taken, and milliseconds of the timed mix by number of threads."""

    num_threads: int
    ms_by_threads: Mapping[int, float]

    def __str__(self) -> str:
        times = ", ".join(f"{ms:.1f} ms with {number}" for number, ms in self.ms_by_threads.items())
        return f"CPU threads: {NUM_STEPS} steps and a verification take {times}; decoding uses {self.num_threads}"


def choose_threads(model: Any, *, clock: Callable[[], float] = time.perf_counter) -> ThreadChoice | None:
    """Set torch's threads to the number under which this LayerSkipModel decodes fastest: all that torch would take, or
    half of them, a quarter ... 1.

    None, and nothing is changed, where there is nothing to choose: no CPU computes, torch has one thread, or the
    environment fixes the number. Cost: up to seven passes over every candidate, none begun after 10 seconds.
    """
    import torch

    from layerskip.analysis.step_times import StepTimer

    most = torch.get_num_threads()
    if model.device.type != "cpu" or most == 1 or threads_are_fixed():
        return None
    timer = StepTimer(model, NUM_STEPS)
    candidates = halves(most)
    seconds: dict[int, list[float]] = {number: [] for number in candidates}
    start = clock()
    try:
        for number in candidates:  # the first pass wakes threads and fills caches
            torch.set_num_threads(number)
            timer.verify_s(_TEXT, (1,))
        for _ in range(_PASSES):
            for number in candidates:
                torch.set_num_threads(number)
                seconds[number].append(sum(timer.verify_s(_TEXT, (*(1,) * NUM_STEPS, NUM_STEPS + 1))))
            if clock() - start > _LONGEST_S:
                break
    finally:
        torch.set_num_threads(most)
    typical = {number: median(seconds[number]) for number in candidates}
    fastest = min(typical.values())
    chosen = min(number for number in candidates if typical[number] <= _TIE * fastest)
    torch.set_num_threads(chosen)
    return ThreadChoice(chosen, {number: 1000 * typical[number] for number in candidates})


def halves(most: int) -> list[int]:
    """`most`, half of it, ... 1."""
    return [most >> i for i in range(most.bit_length())]
