"""Facts of this machine and of what is installed on it, to be kept with every number."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_FIX_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Whoever sets one of these has decided on the number of threads."""

_GROUP = Path("/sys/fs/cgroup")
"""Of the container that this process is in, where it is in one."""
_CPU_LIMITS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files there that say how much time in how much all its threads may compute: of cgroup v2, and of v1."""

_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of <malloc.h>."""


def device_name(device: Any) -> str:
    """`cpu`, or the name the driver gives the device."""
    if device.type == "cuda":
        import torch

        return str(torch.cuda.get_device_name(device))
    return str(device.type)


def device_names(devices: Sequence[Any]) -> str:
    """Of all of them, those of one name counted: `2 x NAME`."""
    counts = Counter(device_name(device) for device in devices)
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def cpu_name() -> str:
    """The processor's model name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def own_cores() -> list[int] | None:
    """The cores this process may run on; None where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def num_cores() -> int:
    """How many cores this process may run on; all of the machine's where the system does not tell."""
    return len(own_cores() or ()) or os.cpu_count() or 1


def threads_are_fixed() -> bool:
    """Whether the environment says how many threads there are to be."""
    return any(os.environ.get(name) for name in _FIX_THREADS)


def cpu_limit() -> float | None:
    """How many cores the container that this process is in may keep busy; None where there is no limit."""
    for files in _CPU_LIMITS:
        with suppress(OSError, ValueError):
            quota, period = " ".join((_GROUP / file).read_text(encoding="ascii") for file in files).split()
            if (cores := int(quota) / int(period)) > 0:
                return cores
    return None


def keep_to_cpu_limit() -> None:
    """Have torch compute on no more threads than a container may keep busy: all would stop until the next tenth of a
    second. Nothing changes where the environment says how many there are to be."""
    import torch

    limit = None if threads_are_fixed() else cpu_limit()
    if limit is not None and limit < torch.get_num_threads():
        torch.set_num_threads(max(1, int(limit)))


def package_version(name: str) -> str:
    """Version of an installed package, `unknown` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def git_commit(folder: Path) -> str | None:
    """HEAD of the checkout that holds `folder`, with `+changes` if files differ; None outside a checkout."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def trim_heap() -> None:
    """Hand the free pages of the C heap back to the system, where the C library can (glibc); nothing happens elsewhere.

    Cost: some milliseconds, and a page fault for each page that is needed again.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def return_large_blocks() -> None:
    """From now on let the C library hand blocks of 4 MiB and more back to the system as soon as they are free (glibc;
    nothing happens elsewhere).

    By itself it keeps blocks of up to 32 MiB, and a search whose logits are that large is left with as much in holes as
    it uses. Cost: page faults for each such block, which take a hundredth of what computes so many numbers.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 1 << 22)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector out of a timed region; whatever it was before, it is afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
