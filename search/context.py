"""Tools: what a run needs of the world."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from search.stop import StopSignal
from search.terminal.reporter import Reporter
from search.workers.heartbeats import Patience


@dataclass(frozen=True)
class Tools:
    """What the run needs of the world."""

    reporter: Reporter
    stop: StopSignal
    command: str
    clock: Callable[[], float] = time.perf_counter
    patience: Patience = field(default_factory=Patience)
