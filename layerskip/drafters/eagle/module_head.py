"""ModuleHead: a `StateHead` in Transformers' own modules, and ModuleText: one text's keys and values under it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch

from layerskip.drafters.eagle.state_head import StateHead, StateText
from layerskip.huggingface.adapter import ForcedPositions
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.huggingface.kv_cache import SharedLengthCache


class ModuleHead(StateHead):
    """Its layer is told by a mask what each row sees, and writes keys and values through a Hugging Face cache."""

    rotary: Any
    """What gives the layer its positions' cosines and sines."""

    @abstractmethod
    def block(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The layer over what `enter` gave, (1, R, width); arguments as those of a decoder layer; (1, R, hidden)."""

    def new_text(self, capacity: int) -> ModuleText:
        return ModuleText(self, capacity)


class ModuleText(StateText):
    """See `StateText`. Positions are the tokens' own, one behind those of the states, as in training."""

    head: ModuleHead

    def __init__(self, head: ModuleHead, capacity: int) -> None:
        self.head = head
        self._cache = SharedLengthCache([None], capacity)

    @property
    def keys(self) -> torch.Tensor:
        return cast(torch.Tensor, self._cache.layers[0].keys)

    @property
    def values(self) -> torch.Tensor:
        return cast(torch.Tensor, self._cache.layers[0].values)

    def copied(self, length: int, room: int) -> ModuleText:
        """See `StateText`."""
        copy = ModuleText(self.head, length + room)
        copy._cache.layers[0].lazy_initialization(self.keys, self.values)
        copy.keys[:, :, :length], copy.values[:, :, :length] = self.keys[:, :, :length], self.values[:, :, :length]
        return copy

    @torch.inference_mode()
    def run_rows(
        self, x: torch.Tensor, positions: slice | torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `StateText`."""
        num_rows = len(x)
        self._cache.rollback_to(0)
        self._cache.advance(start)
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=x.device)
        ids, hidden = (positions + 1).unsqueeze(0), None  # of a single row that sees all before it
        if mask is None and num_rows > 1:
            places = torch.arange(num_rows, device=x.device)
            mask = places <= places.unsqueeze(1)
        if mask is not None:
            hidden = ForcedPositions.of(positions, {None: mask}, x.dtype).attention_mask
        with over_growing_keys((x.device,)):
            out = self.head.block(
                x.unsqueeze(0),
                attention_mask=hidden,
                position_embeddings=self.head.rotary(x, position_ids=ids),
                position_ids=ids,
                past_key_values=self._cache,
            )
        return out[0]
