"""The interface that every engine serves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from layerskip.kv_cache import SharedLengthCache
from layerskip.skip_mask import SkipMask


class Engine(Protocol):
    """One model and, inside `session`, one cache."""

    name: str

    @property
    def device(self) -> torch.device: ...

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
