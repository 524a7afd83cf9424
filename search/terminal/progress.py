"""Progress: how far a part of a run is and how long it will still take, told where it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable

from search.terminal.text import duration

EVERY_S = 10.0
"""Between two lines; what is over sooner has none."""


class Progress:
    """A `Tell` for one part of a run, whose steps take about equally long."""

    def __init__(self, say: Callable[[str], None], what: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """what: the steps, in the plural."""
        self._say, self._what, self._clock = say, what, clock
        self._start = self._told = clock()

    def __call__(self, done: int, total: int) -> None:
        """See `Tell`. Nothing done: the first step begins now."""
        now = self._clock()
        if done == 0:
            self._start = self._told = now
        if now - self._told < EVERY_S or done >= total:
            return
        self._told = now
        left_s = (now - self._start) / done * (total - done)
        self._say(f"{done} of {total} {self._what}, about {duration(left_s)} left")
