"""ModuleExecutor: the model's own modules in static form, for the architectures that can be told positions and mask."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.engines.cuda_graph.static_step import Branches, additive_mask
from layerskip.engines.recording.sync_watch import SyncError, SyncWatch
from layerskip.huggingface.adapter import ForcedPositions, ModelAdapter, UnsupportedModelError
from layerskip.huggingface.growing_keys import growing_keys_backend
from layerskip.huggingface.kv_cache import LengthReadError, StaticCache


class ModuleExecutor:
    """See `StaticExecutor`. No second copy of the weights.

    Positions and mask are handed to the model, so that nothing in it has to ask the cache for its length: the cache
    refuses to tell inside a static step, because a recording would freeze the answer. Attention is torch's choice
    without cuDNN's kernel, as in the adapter's other forwards: recorded, that would plan once a shape, but it raises
    where it finds no plan, which torch does not make good by another kernel.
    Raises: UnsupportedModelError for models that ask all the same, take no positions (alibi), or read numbers back
    from the device.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        name = type(adapter.model).__name__
        if not adapter.takes_positions:
            raise UnsupportedModelError(f"engine cuda_graph: {name} cannot be told its tokens' positions")
        if adapter.recurrent_layers or adapter.num_keyed < adapter.num_layers:
            raise UnsupportedModelError(
                f"engine cuda_graph: {name} has layers that keep a state, or read others' keys, which is not recorded"
            )
        self._mixed = len(set(adapter.windows)) > 1
        with torch.inference_mode():
            try:
                logits = self._probe()
            except (LengthReadError, SyncError) as error:
                raise UnsupportedModelError(f"engine cuda_graph: {name}: {error}") from None
        self.vocab_size, self.logits_dtype = logits.shape[-1], logits.dtype

    @property
    def num_compilations(self) -> int:
        return 0

    @property
    def attention_backend(self) -> str:
        return growing_keys_backend(self._adapter.placement.devices)

    def use(self, cache: StaticCache) -> None:
        self._cache = cache
        device = self._adapter.device
        # The layers allocate their buffers at their first write. A mask may skip a layer at first, and a recording must
        # not be the one to allocate, so the whole model runs here once.
        with self._adapter.attached():
            self.forward(torch.zeros(1, dtype=torch.long, device=device), self._no_skip, 1)

    def session(self) -> AbstractContextManager[None]:
        return self._adapter.attached()

    def prepare_draft(self, mask: SkipMask) -> None:
        if mask.bits is not None:
            self._adapter.prepare_int8(mask)

    def forward(self, ids: torch.Tensor, mask: SkipMask, num_logits: int) -> torch.Tensor:
        return self._adapter.forward(ids, self._cache, mask, num_logits=num_logits)

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: SkipMask,
        num_visible: int,
        num_logits: int,
        branches: Branches | None = None,
    ) -> torch.Tensor:
        adapter = self._adapter
        masks: dict[int | None, Any] = {
            window: additive_mask(positions, num_visible, window, adapter.dtype, branches=branches)[None, None]
            for window in set(adapter.windows)
        }
        attention_mask: Any = next(iter(masks.values()))
        if self._mixed:
            window = next(window for window in masks if window is not None)
            attention_mask = {"full_attention": masks[None], "sliding_attention": masks[window]}
        if adapter.max_positions is not None:
            # A whole round drafts beyond the text's end, too, where none is accepted: a table of positions ends there.
            positions = positions.clamp(max=adapter.max_positions - 1)
        forced = ForcedPositions(positions, attention_mask)
        return adapter.forward(ids, self._cache, mask, num_logits=num_logits, forced=forced)

    @property
    def _no_skip(self) -> SkipMask:
        return SkipMask.none(self._adapter.num_layers)

    def _probe(self) -> torch.Tensor:
        """Logits of one static step after an ordinary one."""
        adapter = self._adapter
        self.use(StaticCache(adapter.windows, 16, adapter.device))
        ids = torch.zeros(2, dtype=torch.long, device=adapter.device)
        positions = torch.tensor([1, 2], device=adapter.device)
        with self.session(), self._cache.static_step(positions, 16), SyncWatch():
            return self.step(ids, positions, self._no_skip, 16, 1)
