"""Memory, for copies of weights and what else is kept."""

from __future__ import annotations

import os

import torch


def free_bytes(device: torch.device) -> int:
    """On this device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine_bytes() -> int | None:
    """All that this machine has, in use or not; None where it does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
