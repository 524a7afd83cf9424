"""The device that a part of the GPU study runs on: which, in what state, and whether it still answers."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from layerskip.machine.host import cpu_name, device_name, git_commit, package_version
from layerskip.machine.nvidia import gpu_states, unit_name
from studies.gpu.environment import ROOT

_COPIES, _TIMES = 10, 5


def study_device() -> torch.device:
    """The CUDA device where there is one; a rehearsal runs on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine_facts() -> dict[str, Any]:
    """What a number is worth nothing without. Starts the device."""
    device = study_device()
    torch.ones(1, device=device)
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in ("torch", "transformers", "triton", "optuna")},
        "commit": git_commit(ROOT),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def moment() -> dict[str, Any]:
    """What driver and allocator say now: clocks, power, temperature, and the most memory since the last call."""
    if not torch.cuda.is_available():
        return {}
    unit = unit_name(str(torch.cuda.get_device_properties(0).uuid))
    found = {"gpus": gpu_states([unit])}
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found | {"peak_allocated_bytes": peak}


def device_is_sound() -> bool:
    """Whether the device computes: after a failed operation a process may get nothing but errors from it."""
    try:
        return float(torch.ones(2, device=study_device()).sum()) == 2.0
    except RuntimeError:
        return False


def free_memory() -> None:
    """Give back what is not referred to: an engine that needs a second copy of the weights asks what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s, read and written, of copying a tensor far larger than any cache: the best of five times ten copies."""
    size = (4 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.randn(size // 4, device=device)  # zeros may be copied faster
    target = torch.empty_like(source)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds()
    best = min(seconds() for _ in range(_TIMES))
    return _COPIES * 2 * size / best
