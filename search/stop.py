"""StopSignal: Ctrl-C and SIGTERM end a search between storage writes, never inside one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt where that is safe, and into a flag elsewhere.

    Outside `deferred` a signal raises at once. Inside, the first one raises only within `interruptible` (decoding) and
    otherwise sets `received`, which the search looks at after each trial; a second one raises wherever it comes.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raise_now = True

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + signal."""
        return 128 + (self.received or signal.SIGINT)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals in here; the handlers before come back afterwards. Main thread only."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only set the flag in here."""
        self._raise_now = False
        try:
            yield
        finally:
            self._raise_now = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise at once in here; raises on entry if a signal came before."""
        if self.received is not None:
            raise KeyboardInterrupt
        before, self._raise_now = self._raise_now, True
        try:
            yield
        finally:
            self._raise_now = before

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        second, self.received = self.received is not None, number
        if second or self._raise_now:
            raise KeyboardInterrupt
