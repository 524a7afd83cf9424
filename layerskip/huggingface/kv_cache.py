"""One key-value cache shared by draft and target; its length is one number, rollback is O(1)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from layerskip.huggingface.recurrent import RecurrentLayer


class SharedLengthCache(Cache):  # type: ignore[misc]
    """Per-layer key and value buffers under one shared length.

    Hugging Face caches track a length per layer and read positions and mask sizes from one of them, which is stale as
    soon as a draft skipped that layer. Here every layer answers with the cache's own `length`: a forward over n tokens
    writes at [length, length + n), and the caller then advances or rolls back by setting the length. Skipped layers
    hold rubbish at drafted positions until verification overwrites it.

    `windows` has one entry per layer: the sliding window's size, or None for full attention. Sliding layers keep the
    full buffer too, because a rolled-back window would have lost what it slid over. Layers in `recurrent` have a state
    instead, made of as many parts as it says, see `RecurrentLayer`.
    """

    def __init__(
        self, windows: Sequence[int | None], capacity: int, recurrent: Mapping[int, int] | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1, got {capacity}")
        self._length = 0
        self._recurrent = dict(recurrent or {})
        self.num_filled = 0
        """Tokens that `fill` began with; what comes right after them is the rest of a prompt."""
        self.capacity = capacity
        super().__init__(
            layers=[
                RecurrentLayer(self, self._recurrent[i]) if i in self._recurrent else self._new_layer(window)
                for i, window in enumerate(windows)
            ]
        )

    def _new_layer(self, window: int | None) -> _SharedLengthLayer:
        return _SharedLengthLayer(self, window)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Of a layer that keeps a state, whether it has one; without a place of the one that runs, where Transformers
        5.17 goes by the last."""
        if layer_idx is None:
            layer_idx = next((i for i in self._recurrent if self.layers[i].is_running), max(self._recurrent))
        known: bool = super().has_previous_state(layer_idx, state_idx)
        return known

    @property
    def keeps_rows(self) -> bool:
        """Whether every layer keeps something of each position, and none a state of them all."""
        return not self._recurrent

    @property
    def keyed_layers(self) -> list[_SharedLengthLayer]:
        """Those that keep keys and values."""
        return [layer for i, layer in enumerate(self.layers) if i not in self._recurrent]

    @property
    def length(self) -> int:
        """Tokens whose keys and values count."""
        return self._length

    @property
    def num_positions(self) -> int:
        """Positions that the buffers have."""
        return self.capacity

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens, just written by a forward."""
        self._set_length(self._length + num_tokens)

    def rollback_to(self, length: int) -> None:
        """Forget everything from position `length` on. No copy, no device work, but of layers that keep a state."""
        if length > self._length:
            raise ValueError(f"length: can only roll back, from {self._length}, got {length}")
        self._set_length(length)
        for i in self._recurrent:
            self.layers[i].roll_back(length)

    def move(self, sources: Sequence[int], place: int) -> None:
        """What was written at these positions stands at `place` and after it too. Cost: a copy of them a layer."""
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                buffer[:, :, place : place + len(sources)] = buffer[:, :, sources]

    @property
    def bytes_per_position(self) -> int:
        """Keys and values of all layers; once each has been written to."""
        return sum(int(one[:, :, :1].nbytes) for layer in self.keyed_layers for one in (layer.keys, layer.values))

    @property
    def state_bytes(self) -> int:
        """Of the layers that keep a state; once each has been written to."""
        return sum(self.layers[i].nbytes for i in self._recurrent)

    def rows(self, stop: int) -> list[tuple[torch.Tensor, ...]]:
        """Copies of each layer's keys and values (B, heads, stop, head_dim) at the first positions, or of its state,
        which is that of all of them."""
        if self._recurrent and stop != self._length:
            raise ValueError(f"stop: must be the length, {self._length}, where layers keep a state, got {stop}")
        return [layer.rows(stop) for layer in self.layers]

    def fill(self, rows: Sequence[tuple[torch.Tensor, ...]], stop: int) -> None:
        """Begin with the first `stop` of these instead of computing them, or all; `rows` gave them, of the same model.
        Layers that keep a state begin with all alone."""
        if self._length:
            raise ValueError(f"cache: must be empty to be filled, holds {self._length} tokens")
        for layer, one in zip(self.layers, rows, strict=True):
            layer.fill(one, stop)
        self._set_length(stop)
        self.num_filled = stop

    def _set_length(self, length: int) -> None:
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length: must be in 0..{self.capacity} (the cache's capacity), got {length}")
        self._length = length


class _SharedLengthLayer(CacheLayerMixin):  # type: ignore[misc]
    """Buffers of one layer, allocated at the first write; shapes (B, heads, capacity, head_dim)."""

    is_croppable = True
    states: torch.Tensor
    """Keys and after them values, (B, 2 * heads, capacity, head_dim), in one buffer where both are alike."""

    def __init__(self, cache: SharedLengthCache, window: int | None) -> None:
        super().__init__()
        # Weak, or the buffers of every finished text would wait for the garbage collector, which seldom comes.
        self._cache = cast(SharedLengthCache, weakref.proxy(cache))
        self._window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[1::2] == value_states.shape[1::2] and key_states.dtype == value_states.dtype:
            num_heads = key_states.shape[1]
            self.states = self._buffer(key_states, 2 * num_heads)
            self.keys, self.values = self.states[:, :num_heads], self.states[:, num_heads:]
        else:
            self.keys = self._buffer(key_states, key_states.shape[1])
            self.values = self._buffer(value_states, value_states.shape[1])
        self.is_initialized = True

    def rows(self, stop: int) -> tuple[torch.Tensor, ...]:
        """See `SharedLengthCache`."""
        return self.keys[:, :, :stop].clone(), self.values[:, :, :stop].clone()

    def fill(self, rows: tuple[torch.Tensor, ...], stop: int) -> None:
        """See `SharedLengthCache`."""
        keys, values = rows
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys[:, :, :stop] = keys[:, :, :stop]
        self.values[:, :, :stop] = values[:, :, :stop]

    def _buffer(self, like: torch.Tensor, num_heads: int) -> torch.Tensor:
        # Zeros, not empty: attention never reads past the length, but NaN rubbish times a zero weight would be NaN.
        return like.new_zeros((like.shape[0], num_heads, self._cache.num_positions, like.shape[3]))

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
        return first_visible(self._cache.length, self._window)

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        # -1 = grows: the capacity is an allocation, not a limit that position encodings may rely on.
        return -1


def first_visible(length: int, window: int | None) -> int:
    """The first position that a token after `length` others sees."""
    return 0 if window is None else max(length - window + 1, 0)


class DeviceNumber:
    """`tensor` (1,) int64 has a fixed address, for recorded work to read and write. No method waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.long, device=device)
        self._holds: int | None = 0

    def set(self, value: int) -> torch.Tensor:
        """The tensor, made to hold `value`: written only where it is not known to."""
        if self._holds != value:
            self.tensor.fill_(value)
            self._holds = value
        return self.tensor

    def distrust(self) -> None:
        """Work that changes the number is about to run; until `known` it may hold anything."""
        self._holds = None

    def known(self, value: int) -> None:
        """That work has left `value` here."""
        self._holds = value


@dataclass(frozen=True)
class StaticStep:
    """One forward in static form: where it writes and how many positions attention looks at."""

    positions: torch.Tensor
    """(T,) int64 on the device."""
    num_visible: int
    """Attention runs over positions 0..num_visible-1 under a mask."""


class StaticCache(SharedLengthCache):
    """A shared-length cache whose buffers outlive its texts, with its length on the device too.

    Recorded work knows its tensors by address, so the buffers have a fixed size and serve one text after the other
    (`restart`); `capacity` is what the present text may use of them. `position` is the length as the device sees it,
    and `text` has room for the tokens themselves, by position, for work that does not hand each to the host.

    Inside `static_step` the layers write at the step's positions and answer with the first `num_visible` positions;
    outside they behave like the base class, which prompt processing uses.
    """

    def __init__(self, windows: Sequence[int | None], num_positions: int, device: torch.device) -> None:
        super().__init__(windows, num_positions)
        self._num_positions = num_positions
        self.position = DeviceNumber(device)
        self.text = torch.zeros(num_positions, dtype=torch.long, device=device)
        self.step: StaticStep | None = None

    def _new_layer(self, window: int | None) -> _SharedLengthLayer:
        return _StaticLayer(self, window)

    @property
    def num_positions(self) -> int:
        return self._num_positions

    def restart(self, capacity: int) -> None:
        """Begin another text of up to `capacity` tokens in the same buffers. Cost: one pass over their memory."""
        if not 1 <= capacity <= self._num_positions:
            raise ValueError(f"capacity: must be in 1..{self._num_positions} (the buffers' size), got {capacity}")
        self._length = self.num_filled = 0
        self.capacity = capacity
        for layer in self.layers:
            if layer.is_initialized:
                # A masked weight is zero, but zero times a NaN that an earlier text left there would be NaN.
                layer.keys.zero_()
                layer.values.zero_()

    def position_on_device(self) -> torch.Tensor:
        """(1,) int64 that holds the length. No device sync."""
        return self.position.set(self._length)

    def moved_to(self, length: int) -> None:
        """Work on the device has set `position` to `length`, which is now the cache's."""
        self._set_length(length)
        self.position.known(length)

    def advance(self, num_tokens: int) -> None:
        """See `SharedLengthCache`; in a static step nothing, for there positions are the device's business."""
        if self.step is None:
            super().advance(num_tokens)

    @contextmanager
    def static_step(self, positions: torch.Tensor, num_visible: int) -> Iterator[None]:
        """A forward in static form, over `positions` (T,), seeing `num_visible` positions."""
        self.step = StaticStep(positions, num_visible)
        try:
            yield
        finally:
            self.step = None


class _StaticLayer(_SharedLengthLayer):
    """See `StaticCache`."""

    _cache: StaticCache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._cache.step
        if step is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, step.positions, key_states)
        self.values.index_copy_(2, step.positions, value_states)
        return self.keys[:, :, : step.num_visible], self.values[:, :, : step.num_visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        step = self._cache.step
        return super().get_mask_sizes(query_length) if step is None else (step.num_visible, 0)

    def get_seq_length(self) -> int:
        if self._cache.step is not None:
            raise LengthReadError("the length was read as a number inside a static step; a recording would freeze it")
        return super().get_seq_length()


class LengthReadError(RuntimeError):
    """A model asked a static step for a number that changes from one replay to the next."""
