"""Teacher forcing through the model's own modules, for every supported architecture, one text at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from layerskip.analysis.teacher_forcing.base import TeacherForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText, RowGeometry
from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.adapter import ForcedPositions, ModelAdapter
from layerskip.rounds.sampling import SamplingParams


class WholeModelForcing(TeacherForcing):
    """See `TeacherForcing`; `keys="target"`: each layer is handed the target's keys and values in front of its own,
    under a mask of our making, which not every architecture takes. Not for layers that keep a state in place of keys.

    Cost: per text a target forward at construction and a draft forward a reading. Memory: the target's keys and values.
    """

    keys = "target"

    def __init__(
        self, adapter: ModelAdapter, texts: Sequence[ForcedText], sampling: SamplingParams | None = None
    ) -> None:
        super().__init__(texts, adapter.device, sampling)
        self._adapter = adapter
        self._caches: list[Any] = []
        with torch.inference_mode(), adapter.attached():
            for i, text in enumerate(texts):
                cache = adapter.new_cache(len(text.ids))
                ids = torch.tensor(text.ids, device=adapter.device)
                logits = adapter.forward(ids, cache, num_logits=len(text.continuation_ids) + 1)
                self._note_target(i, logits)
                self._caches.append(cache)

    @property
    def nbytes(self) -> int:
        """See `TeacherForcing`."""
        layers = [layer for cache in self._caches for layer in cache.keyed_layers]
        keys: int = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return keys + self._noise_bytes

    def logits(self, mask: SkipMask, rows: Sequence[RowGeometry]) -> Iterator[torch.Tensor]:
        for i, one in enumerate(rows):
            if not len(one.ids):
                yield torch.empty(0, device=self._adapter.device)
                continue
            with torch.inference_mode(), self._adapter.attached():
                logits = self._substituted(i, mask, one)
            yield logits

    def draft_logits(
        self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None
    ) -> Iterator[torch.Tensor]:
        for i in range(len(self.texts)) if texts is None else texts:
            text = self.texts[i]
            with torch.inference_mode(), self._adapter.attached():
                logits = self._substituted(i, mask, RowGeometry.of(text, depth, self._adapter.device))
            yield logits.view(depth + 1, len(text.continuation_ids), -1)

    def _substituted(self, i: int, mask: SkipMask, rows: RowGeometry) -> torch.Tensor:
        cache: Any = _SubstitutedCache(self._caches[i], len(self.texts[i].prompt_ids))
        num_keys = len(self.texts[i].ids)
        visible = {
            window: torch.cat([rows.sees_target(num_keys, window), rows.sees_rows(window)], dim=1)
            for window in set(self._adapter.windows)
        }
        forced = ForcedPositions.of(rows.positions, visible, self._adapter.dtype)
        return self._adapter.forward(rows.ids, cache, mask, num_logits=len(rows.ids), forced=forced)


class _SubstitutedCache(Cache):  # type: ignore[misc]
    """Read-only: every layer answers with the target's keys and values followed by those of the present forward."""

    def __init__(self, target: Any, start: int) -> None:
        self.length = start
        super().__init__(layers=[_SubstitutedLayer(layer, target.length, start) for layer in target.layers])

    def advance(self, num_tokens: int) -> None:
        """Nothing is written, so there is nothing to count."""


class _SubstitutedLayer(CacheLayerMixin):  # type: ignore[misc]
    is_croppable = False

    def __init__(self, layer: Any, length: int, start: int) -> None:
        super().__init__()
        self._start = start
        self.keys, self.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        self.is_initialized = True
        self.is_sliding = layer.is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2] + query_length, 0

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1
