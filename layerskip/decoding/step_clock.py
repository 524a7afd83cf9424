"""StepClock: seconds of work on an engine, in which nothing may be recorded, compiled or planned."""

from __future__ import annotations

import time

from layerskip.engines.base import Engine


class StepClock:
    """Seconds between laps, the device synchronised before every read.

    What an engine does once (recording a CUDA graph, compiling a layer) takes longer than what is timed, and falls on
    whoever comes first. So a lap in which the engine's `num_preparations` has grown raises RuntimeError: something was
    not prepared that had to be.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.skip()

    def lap(self) -> float:
        before, prepared = self._start, self._prepared
        self.skip()
        if self._prepared != prepared:
            raise RuntimeError(
                f"engine {self._engine.name}: recorded or compiled {self._prepared - prepared} times inside a timed "
                "region; it must be prepared before the clock starts (this is a bug)"
            )
        return self._start - before

    def skip(self) -> None:
        """Start anew: what happened since the last lap is not timed."""
        self._engine.synchronize()
        self._prepared = self._engine.num_preparations
        self._start = time.perf_counter()
