"""Free memory, for copies of weights."""

from __future__ import annotations

import os

import torch


def free_bytes(device: torch.device) -> int:
    """On this device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
