"""Beats: a thread that gives signs of life for whoever asks, as long as this process lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

from optuna.storages import BaseStorage


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
