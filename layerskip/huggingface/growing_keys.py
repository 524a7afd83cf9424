"""Attention over keys whose number changes from one forward to the next: which of torch's kernels may compute it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

TORCHS_CHOICE = "torch's choice"
WITHOUT_CUDNN = "torch's choice without cudnn"


def over_growing_keys(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Around forwards on these devices.

    On Hopper GPUs scaled-dot-product attention takes cuDNN's kernel first (torch 2.11 with cuDNN 9.15 and later), which
    makes a plan of some 30 ms for every new shape: for every token here. Not by `sdpa_kernel`, which costs tens of
    microseconds, as much as a layer. As all of torch's attention flags, it is the process's: other threads see it.
    """
    return _without_cudnn() if _any_cuda(devices) else nullcontext()


def growing_keys_backend(devices: Iterable[torch.device]) -> str:
    """What `over_growing_keys` leaves to compute attention."""
    return WITHOUT_CUDNN if _any_cuda(devices) else TORCHS_CHOICE


def _any_cuda(devices: Iterable[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
