"""The interface that every engine serves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from layerskip.adapter import ModelAdapter
from layerskip.growing_keys import growing_keys_backend
from layerskip.kv_cache import SharedLengthCache
from layerskip.skip_mask import SkipMask


class Engine(Protocol):
    """One model and, inside `session`, one cache."""

    name: str

    @property
    def device(self) -> torch.device: ...

    @property
    def attention_backend(self) -> str:
        """What computes attention in the steps of decoding; to be recorded with every number."""
        ...

    @property
    def cache(self) -> SharedLengthCache:
        """The running session's cache."""
        ...

    def session(self, capacity: int) -> AbstractContextManager[None]:
        """A fresh cache of `capacity` tokens; on exit it is freed and the model is as it was."""
        ...

    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        """Logits (num_logits, V) of the last positions; the cache advances by len(input_ids)."""
        ...

    def synchronize(self) -> None:
        """Wait for the device; before every clock read."""
        ...


class SessionEngine:
    """What the engines share: the adapter, the running session's cache, and waiting for the device."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._cache: SharedLengthCache | None = None

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def attention_backend(self) -> str:
        return growing_keys_backend(self._adapter.placement.devices)

    @property
    def cache(self) -> SharedLengthCache:
        if self._cache is None:
            raise RuntimeError("no cache: use the engine inside `with engine.session(capacity)`")
        return self._cache

    def synchronize(self) -> None:
        for device in self._adapter.placement.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
