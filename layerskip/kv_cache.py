"""One key-value cache shared by draft and target; its length is one number, rollback is O(1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SharedLengthCache(Cache):  # type: ignore[misc]
    """Per-layer key and value buffers under one shared length.

    Hugging Face caches track a length per layer and read positions and mask sizes from one of them, which is stale as
    soon as a draft skipped that layer. Here every layer answers with the cache's own `length`: a forward over n tokens
    writes at [length, length + n), and the caller then advances or rolls back by setting the length. Skipped layers
    hold rubbish at drafted positions until verification overwrites it.

    `windows` has one entry per layer: the sliding window's size, or None for full attention. Sliding layers keep the
    full buffer too, because a rolled-back window would have lost what it slid over.
    """

    def __init__(self, windows: Sequence[int | None], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1, got {capacity}")
        self._length = 0
        self.capacity = capacity
        super().__init__(layers=[_SharedLengthLayer(self, window) for window in windows])

    @property
    def length(self) -> int:
        """Tokens whose keys and values count."""
        return self._length

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens, just written by a forward."""
        self._set_length(self._length + num_tokens)

    def rollback_to(self, length: int) -> None:
        """Forget everything from position `length` on. No copy, no device work."""
        if length > self._length:
            raise ValueError(f"length: can only roll back, from {self._length}, got {length}")
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length: must be in 0..{self.capacity} (the cache's capacity), got {length}")
        self._length = length


class _SharedLengthLayer(CacheLayerMixin):  # type: ignore[misc]
    """Buffers of one layer, allocated at the first write; shapes (B, heads, capacity, head_dim)."""

    is_croppable = True

    def __init__(self, cache: SharedLengthCache, window: int | None) -> None:
        super().__init__()
        self._cache = cache
        self._window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: attention never reads past the length, but NaN rubbish times a zero weight would be NaN.
        batch, heads, _, width = states.shape
        return torch.zeros((batch, heads, self._cache.capacity, width), dtype=states.dtype, device=states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write n new positions and return all keys and values that the mask sizes announce. No device sync."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self._cache.length
        stop = start + key_states.shape[-2]
        if stop > self._cache.capacity:
            raise ValueError(f"cache: capacity is {self._cache.capacity} tokens, a forward needs {stop}")
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        first = self._first_visible()
        return self.keys[:, :, first:stop], self.values[:, :, first:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_visible()
        return self._cache.length + query_length - first, first

    def _first_visible(self) -> int:
        """First position any query of this forward can see; the mask does the rest."""
        return 0 if self._window is None else max(self._cache.length - self._window + 1, 0)

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        # -1 = grows: the capacity is an allocation, not a limit that position encodings may rely on.
        return -1
