"""GNU's OpenMP, by which torch and the kernels compute on several threads of a CPU.

A thread that computes keeps a team of others, which spin while they wait for its next task. As soon as the teams of a
process have more threads than it has CPUs they go to sleep after a hundred turns rather than 300,000 (`GOMP_SPINCOUNT`),
and every step then waits for them to wake up.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

_SOFT = 1
"""`omp_pause_soft`: what has been set, such as the number of threads, stays."""


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
    """End the calling thread's team, so that another thread may have one that spins; the next task makes a new one.

    Cost: some tenths of a millisecond, together with making it again.
    """
    if (library := _library()) is not None:
        library.omp_pause_resource_all(_SOFT)
