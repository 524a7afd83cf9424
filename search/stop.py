"""StopSignal: signals and time limits end a search between storage writes, never inside one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, a pre-emption, a terminal that was closed."""

_TOGETHER_S = 0.5


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> Iterator[None]:
    """Handle the signals in here; the handlers before come back afterwards. Main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def heeded() -> list[int]:
    """The signals of `SIGNALS` that are not ignored: `nohup` is there to survive SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class TrialTimedOut(RuntimeError):  # noqa: N818 (reads as the fact it states)
    """A trial took longer than it may."""


class StopSignal:
    """Turns SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt where that is safe, and into a flag elsewhere.

    Outside `deferred` a signal raises at once. Inside, the first one raises only within `interruptible` (decoding) and
    otherwise sets `received`, which the search looks at after each trial. A time limit (`limited`) raises TrialTimedOut
    by the same rule.

    A second signal raises wherever it comes; with `ends_process` it ends the process on the spot, which harms a storage
    less than an exception in the middle of a write does, and the next run clears up. Signals that come together, as
    from a terminal that closes, count as one there.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.received: int | None = None
        self._ends_process = ends_process
        self._first_at = 0.0
        self._raise_now = True
        self._limit_s: float | None = None
        self._due: float | None = None

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + signal."""
        return 128 + (self.received or signal.SIGINT)

    def installed(self) -> AbstractContextManager[None]:
        """Handle the signals in here, but for one that is ignored. Main thread only."""
        return handled_by(self.handle, heeded())

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
        """Raise at once in here; raises on entry if a signal came before, or the time is up."""
        if self.received is not None:
            raise KeyboardInterrupt
        self._refuse_if_due()
        before, self._raise_now = self._raise_now, True
        try:
            yield
        finally:
            self._raise_now = before

    @contextmanager
    def limited(self, seconds: float | None) -> Iterator[None]:
        """Raise TrialTimedOut within `interruptible` once so many seconds have passed in here; None = no limit.

        In the main thread an alarm interrupts what runs as soon as it comes back to Python; elsewhere the time is
        looked at on entry to `interruptible`. What never comes back to Python is `watched`'s to end.
        """
        if seconds is None:
            yield
            return
        self._limit_s, self._due = seconds, time.monotonic() + seconds
        has_alarm = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGALRM, self._alarm) if has_alarm else None
        try:
            if has_alarm:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            self._due = None
            if has_alarm:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, before)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        second = self.received is not None
        if second and self._ends_process:
            if time.monotonic() > self._first_at + _TOGETHER_S:
                with suppress(OSError):
                    os.write(2, b"ended at once; the same command clears up and continues\n")
                os._exit(128 + number)
            return
        if not second:
            self._first_at = time.monotonic()
        self.received = number
        if second or self._raise_now:
            raise KeyboardInterrupt

    def _alarm(self, _number: int, _frame: FrameType | None) -> None:
        if self._raise_now and self._due is not None:
            raise self._timed_out()

    def _refuse_if_due(self) -> None:
        if self._due is not None and time.monotonic() >= self._due:
            raise self._timed_out()

    def _timed_out(self) -> TrialTimedOut:
        return TrialTimedOut(f"took longer than {self._limit_s:g} s (--trial-timeout)")
