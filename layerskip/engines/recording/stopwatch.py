"""Stopwatch: how long pieces of device work take, to choose among ways to do the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from layerskip.engines.recording.graph_pool import Replay
from layerskip.engines.recording.recorder import CudaRecorder

Work = Callable[[], None]
SecondsOf = Callable[[Sequence[Work]], list[float]]
"""Seconds of each piece of work."""

_MOST_REPEATS = 7
_ENOUGH_S = 0.1
"""Of each piece; no repeat begins after it, but for the second one."""


class Stopwatch:
    """Calling it gives the shortest of a few runs of each piece of work, in turns, after one that is not timed.

    The shortest, because whatever else runs on the machine only adds. On a CUDA device the work is recorded first and
    replayed, so that launching it does not count, as it does not where steps are recorded.

    Cost: at most eight runs of each, and a recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorder = CudaRecorder(device) if device.type == "cuda" else None

    def __call__(self, works: Sequence[Work]) -> list[float]:
        recordings: list[Replay] = []
        try:
            if self._recorder is not None:
                for work in works:
                    recordings.append(self._recorder.record(work, ()))
            return self._shortest(recordings or works)
        finally:
            for recording in recordings:
                recording.release()

    def _shortest(self, runs: Sequence[Work]) -> list[float]:
        for run in runs:
            self._time(run)
        shortest = [float("inf")] * len(runs)
        total = 0.0
        for repeat in range(_MOST_REPEATS):
            if repeat >= 2 and total > _ENOUGH_S * len(runs):
                break
            for i, run in enumerate(runs):
                seconds = self._time(run)
                shortest[i] = min(shortest[i], seconds)
                total += seconds
        return shortest

    def _time(self, run: Work) -> float:
        start = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start
