"""GNU's OpenMP, by which torch and the kernels compute on several threads of a CPU.

A thread that computes keeps a team of others. They spin while they wait for each other, which is quick where each has a
core to itself; beside another program each keeps its core from the one that it waits for, and a step may take a
hundred times as long. When the teams of a process have more threads than it has CPUs, OpenMP has all of them sleep
after a hundred turns rather than 300,000 (`GOMP_SPINCOUNT`). So a team ends with the run that it computed, lest
another thread's sleep; and while threads wait for a core there is one team too many, which does nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

_MOST_WAITED, _CALM = 0.6, 0.2
"""Seconds in a second that this process's threads wait for a core, all together: with more they no longer spin, with
less nobody else wants the cores."""
_LOOK_S, _PATIENCE_S = 0.3, 5.0
_PAUSE_SOFT = 1
"""Of OpenMP: what has been set, such as the number of threads, stays."""


@cache
def _library() -> ctypes.CDLL | None:
    """The one that torch has loaded; None where that computes by another."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def release_team() -> None:
    """End the calling thread's team; what it computes next makes a new one.

    Cost: some tenths of a millisecond, together with making it again.
    """
    if (library := _library()) is not None:
        library.omp_pause_resource_all(_PAUSE_SOFT)


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """While a thread decodes on this device; several may at once."""
    if device.type != "cpu" or torch.get_num_threads() == 1 or _library() is None:
        yield
        return
    _WATCH.begin()
    try:
        yield
    finally:
        if not _WATCH.end():
            release_team()


class _Watch:
    """Looks while something is computed whether threads wait for a core."""

    def __init__(self) -> None:
        self._lock, self._is_computing = threading.Lock(), threading.Event()
        self._num_computing = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        with self._lock:
            self._num_computing += 1
            self._is_computing.set()
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._run, name="wait for a core", daemon=True)
                with suppress(RuntimeError):  # no more threads to be had: decoded all the same
                    self._thread.start()

    def end(self) -> int:
        """How many still compute."""
        with self._lock:
            self._num_computing -= 1
            if not self._num_computing:
                self._is_computing.clear()
            return self._num_computing

    def _run(self) -> None:
        while True:
            self._is_computing.wait()
            if _share_waited() > _MOST_WAITED:
                _make_team_too_many()
                give_up = time.monotonic() + _PATIENCE_S  # where others take a core now and then it is better to spin
                while _share_waited() > _CALM and time.monotonic() < give_up:
                    pass
                release_team()


def _share_waited() -> float:
    """Seconds in a second that threads wait for a core, all together, measured for `_LOOK_S`."""
    began, before = time.perf_counter(), _waited_s()
    time.sleep(_LOOK_S)
    waited = sum(total - before[task] for task, total in _waited_s().items() if task in before)
    return waited / (time.perf_counter() - began)


def _waited_s() -> dict[str, float]:
    """By thread, how long it has waited for a core so far; nothing where the system does not tell."""
    found = {}
    with suppress(OSError):  # too many open files
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError, ValueError):  # it has ended, or nobody counts
                found[task.name] = int((task / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return found


def _make_team_too_many() -> None:
    """Large enough, together with the team of what computes."""
    library = _library()
    assert library is not None
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # which each thread calls with a null pointer
    size = max(2, library.omp_get_num_procs() - torch.get_num_threads() + 2)
    library.GOMP_parallel(nothing, None, size, 0)


_WATCH = _Watch()
