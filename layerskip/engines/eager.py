"""EagerEngine: every forward runs the Hugging Face modules one by one. Serves every supported architecture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from layerskip.engines.base import SessionEngine
from layerskip.skip_mask import SkipMask


class EagerEngine(SessionEngine):
    """See `Engine`."""

    name = "eager"

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
