"""EagerEngine: every forward runs the Hugging Face modules one by one. Serves every supported architecture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from layerskip.adapter import ModelAdapter
from layerskip.kv_cache import SharedLengthCache
from layerskip.skip_mask import SkipMask


class EagerEngine:
    """See `Engine`."""

    name = "eager"

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._cache: SharedLengthCache | None = None

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def cache(self) -> SharedLengthCache:
        if self._cache is None:
            raise RuntimeError("no cache: use the engine inside `with engine.session(capacity)`")
        return self._cache

    @contextmanager
    def session(self, capacity: int) -> Iterator[None]:
        with self._adapter.attached():
            self._cache = self._adapter.new_cache(capacity)
            try:
                yield
            finally:
                self._cache = None

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        return self._adapter.forward(input_ids, self.cache, mask, num_logits=num_logits)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
