"""Posts: which worker of this host computes where, and on how many threads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_CPU = "cpu"


@dataclass(frozen=True)
class Post:
    """The place of one worker."""

    number: int
    device: str
    cores: tuple[int, ...] | None = None
    """The processor cores it may use; None = any."""
    num_threads: int | None = None
    """Of torch; None = torch's own choice."""

    def __str__(self) -> str:
        if self.cores is None:
            return self.device
        return f"{self.device} cores {','.join(map(str, self.cores))}"


def parse_devices(text: str | None) -> tuple[str, ...]:
    """`cuda:0,cuda:1` as its parts. Raises: ValueError for an empty one."""
    if text is None:
        return ()
    devices = tuple(part.strip() for part in text.split(","))
    if not all(devices):
        raise ValueError(f"devices: must be names with commas between them, as in cuda:0,cuda:1, got {text!r}")
    return devices


def devices_for(num_workers: int | None, given: Sequence[str], device: str) -> tuple[str, ...]:
    """One device per worker: the given ones; or as many GPUs, or the one device as often, as there are workers.

    Raises: ValueError if the numbers do not agree, or there are fewer GPUs than workers.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"workers: must be at least 1, got {num_workers}")
    if given:
        if num_workers is not None and num_workers != len(given):
            raise ValueError(f"workers: must be the number of --devices, {len(given)}, got {num_workers}")
        return tuple(given)
    if num_workers is None or num_workers == 1:
        return (device,)
    from layerskip.huggingface.loading import resolve_device

    kind = resolve_device(device).type
    if kind != "cuda":
        return (kind,) * num_workers
    import torch

    num_gpus = torch.cuda.device_count()
    if num_workers > num_gpus:
        raise ValueError(f"workers: must be at most {num_gpus}, the number of GPUs here, got {num_workers}")
    return tuple(f"cuda:{i}" for i in range(num_workers))


def assign_posts(
    devices: Sequence[str], num_threads: int | None, cores: Sequence[int] | None
) -> tuple[list[Post], list[str]]:
    """A post per device, and warnings. CPU workers get disjoint cores, equally many, if there are enough.

    cores: those this process may use; None where the system does not tell.
    """
    warnings = [
        f"{count} workers on {device}: they disturb each other's timings"
        for device, count in Counter(devices).items()
        if count > 1 and device != _CPU
    ]
    num_cpu = sum(device == _CPU for device in devices)
    if num_cpu < 2:
        return [Post(i, device, None, num_threads) for i, device in enumerate(devices)], warnings
    available = sorted(cores) if cores is not None else list(range(num_cores()))
    each = num_threads or max(1, len(available) // num_cpu)
    is_enough = cores is not None and each * num_cpu <= len(available)
    if not is_enough:
        text = "their cores cannot be told apart here" if cores is None else f"there are {len(available)} cores"
        warnings.append(f"{num_cpu} CPU workers of {each} threads, but {text}: they disturb each other's timings")
    posts, place = [], 0
    for i, device in enumerate(devices):
        if device != _CPU:
            posts.append(Post(i, device, None, num_threads))
            continue
        own = tuple(available[place : place + each]) if is_enough else None
        posts.append(Post(i, device, own, each))
        place += each
    return posts, warnings


def own_cores() -> list[int] | None:
    """The cores this process may run on; None where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def num_cores() -> int:
    """How many cores this process may run on; all of the machine's where the system does not tell."""
    return len(own_cores() or ()) or os.cpu_count() or 1
