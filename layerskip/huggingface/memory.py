"""Memory, for copies of weights and what else is kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_LINUX = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
"""Of the container that this process is in, where it is in one (cgroup v2)."""


def free_bytes(device: torch.device) -> int:
    """What can be had on this device. On Linux with what only keeps files at hand, as those that a model was loaded
    from: that is given up first; elsewhere half of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = re.search(r"^MemAvailable: +(\d+) kB$", _text(_LINUX), re.MULTILINE)
    available = int(told[1]) << 10 if told else (machine_bytes() or 0) // 2
    limit, used = _text(_GROUP / "memory.max").strip(), _text(_GROUP / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return available
    files = re.search(r"^inactive_file (\d+)$", _text(_GROUP / "memory.stat"), re.MULTILINE)
    return max(0, min(available, int(limit) - int(used) + (int(files[1]) if files else 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def lack_of_room(needed: int, device: torch.device) -> str:
    """Why there should be no copy of so many bytes on this device; empty where it takes at most half of what is
    free."""
    free = free_bytes(device)
    return f"{needed >> 20} MiB, and {free >> 20} MiB are free" if needed > free / 2 else ""


def machine_bytes() -> int | None:
    """All that this machine has, in use or not; None where it does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
