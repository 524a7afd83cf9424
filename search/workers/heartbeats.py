"""Heartbeats: the signs of life that a worker gives, and what others conclude from them; nobody's clock is trusted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optuna.storages import BaseStorage

from search.workers.process import is_gone, is_here


class Beats:
    """Calls every registered sign once per interval, from a thread that cannot keep the process from ending.

    A sign is one small write. A storage that cannot be reached is tried again at the next beat: the work itself will
    tell of it.
    """

    def __init__(self, storage: BaseStorage, interval_s: float) -> None:
        self._storage, self._interval_s = storage, interval_s
        self._signs: dict[str, Callable[[int], None]] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, name: str, sign: Callable[[int], None]) -> None:
        """Call `sign` with a growing number from now on."""
        with self._lock:
            self._signs[name] = sign
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
                self._thread.start()

    def drop(self, name: str) -> None:
        """Call it no more; it does not run any longer when this returns."""
        with self._lock:
            self._signs.pop(name, None)

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self._end.wait(self._interval_s):
            count += 1
            with self._lock:
                for sign in self._signs.values():
                    try:
                        sign(count)
                    except Exception:  # noqa: BLE001 (whatever a storage raises while it is away)
                        continue
            self._storage.remove_session()


@dataclass(frozen=True)
class Patience:
    """How often a worker gives a sign of life, and how long others wait for one before they give it up."""

    beat_s: float = 60.0
    dead_after_s: float = 900.0
    """Far above any pause of a live worker, and longer than workers wait for a storage that is away."""
    nameless_after_s: float = 30.0
    """For a trial that has not said yet whose it is, which takes milliseconds."""
    poll_s: float = 0.5
    """Between two looks while waiting for others."""
    hang_grace_s: float = 30.0
    """What a trial that is past its time limit has to come to an end, before its process is ended."""


class Witness:
    """A process of this host is dead once it is gone; one of another host, once its signs of life stop changing.

    How long they have not changed is measured here, on a clock that neither jumps nor counts this machine's sleep: no
    time that another host wrote is ever compared. So a dead worker of another host is known after having been watched
    for as long as `Patience` says.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._seen: dict[object, tuple[Any, float]] = {}
        self._first: dict[str, Any] = {}

    def is_dead(self, token: str, sign: Any) -> bool:
        """`sign` is anything that changes as long as the process lives."""
        return is_gone(token) if is_here(token) else self.unchanged(token, sign) > self._patience.dead_after_s

    def is_sure(self, token: str, sign: Any) -> bool:
        """Whether the process is known to live: it is there, or has given another sign than the first one seen."""
        if is_here(token):
            return not is_gone(token)
        return self._first.setdefault(token, sign) != sign and not self.is_dead(token, sign)

    def is_forgotten(self, what: object) -> bool:
        """Whether something without a name has been there, nameless, for too long."""
        return self.unchanged(what, None) > self._patience.nameless_after_s

    def unchanged(self, what: object, sign: Any) -> float:
        """Seconds since `what` was first seen with this sign."""
        now = self._clock()
        before = self._seen.get(what)
        if before is None or before[0] != sign:
            self._seen[what] = before = (sign, now)
        return now - before[1]
