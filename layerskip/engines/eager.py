"""EagerEngine: every forward runs the Hugging Face modules one by one. Serves every supported architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.engines.states import StatesEngine
from layerskip.engines.tree import DraftTree
from layerskip.huggingface.adapter import ForcedPositions
from layerskip.openmp import computing
from layerskip.rounds.preparation import ForwardPlan


class EagerEngine(StatesEngine):
    """See `Engine`."""

    name = "eager"

    @contextmanager
    def session(self, capacity: int) -> Iterator[None]:
        with self._adapter.attached(), computing(self.device):
            self._cache = self._adapter.new_cache(capacity)
            try:
                yield
            finally:
                self._end_session()

    def prepare(self, plans: Iterable[ForwardPlan]) -> None:
        """See `Engine`: 8-bit weights, where a draft computes with them."""
        for mask in {plan.mask for plan in plans if plan.mask is not None and plan.mask.bits is not None}:
            with self._preparing():
                self._num_made += self._adapter.prepare_int8(mask)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        if mask is not None:
            return self._adapter.forward(input_ids, self.cache, mask, num_logits=num_logits)
        return self._target(input_ids, num_logits)

    @torch.inference_mode()
    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """See `Engine`."""
        adapter, start = self._adapter, self.cache.length
        forced = ForcedPositions.of(
            tree.positions(start, adapter.device),
            {window: tree.visible(start, window, adapter.device) for window in set(adapter.windows)},
            adapter.dtype,
        )
        return self._target(input_ids, len(input_ids), forced)

    def _target(self, input_ids: torch.Tensor, num_logits: int, forced: ForcedPositions | None = None) -> torch.Tensor:
        if not self._keeps_states:
            return self._adapter.forward(input_ids, self.cache, num_logits=num_logits, forced=forced)
        start = self.cache.length
        with self._adapter.states_of(self._kept_layers) as states:
            logits = self._adapter.forward(input_ids, self.cache, num_logits=num_logits, forced=forced)
        self._keep(start, [one[0] for one in states])
        return logits
