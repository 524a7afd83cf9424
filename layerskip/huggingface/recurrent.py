"""Layers that keep a state instead of keys and values (linear attention, short convolutions), and their way back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from layerskip.config.validated import MAX_GAMMA

RECURRENT_LAYER_TYPES = ("linear_attention", "conv")
_LOGGED = 2 * MAX_GAMMA
"""Rows that can be taken back at least; more than any round has."""
_CHUNK = 64
"""Rows that Transformers' rules take together, filled up with zeros."""
_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Their names."""


@dataclass(frozen=True)
class _Checkpoint:
    """What a layer's state was before the token at `position`."""

    position: int
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @classmethod
    def of(cls, layer: LinearAttentionLayer, position: int) -> _Checkpoint:
        """A copy of the layer's present state, which stands there."""
        parts = (layer.conv_states, layer.recurrent_states)
        return cls(position, *({i: one.clone() for i, one in part.items() if one is not None} for part in parts))


@dataclass(frozen=True)
class RecurrentCall:
    """How a layer's module is called, without what comes to it and the cache."""

    forward: Callable[..., Any]
    cache_argument: str
    arguments: dict[str, Any]

    def __call__(self, hidden: torch.Tensor, cache: Any) -> Any:
        return self.forward(hidden, **{self.cache_argument: cache}, **self.arguments)


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]
    """One layer's state under a cache's shared length.

    A state cannot be cut as keys and values can. So the cache tells the layer of a rollback, and it comes there at
    once: from the latest of two earlier states that it keeps, over the rows that have come to it since.

    Cost: memory for three states and for some 128 rows of what came to the layer. A rollback copies the state, and
    where it ends within a forward's rows takes the layer's module over those before.
    """

    is_sliding = False

    def __init__(self, cache: Any, number_of_states: int) -> None:
        """cache: a `SharedLengthCache`."""
        super().__init__(number_of_states=number_of_states)
        self._cache = weakref.proxy(cache)
        self._at: int | None = 0
        """Position that the state stands at; None after a forward that did not come to its end."""
        self._checkpoints = [_Checkpoint(0, {}, {})]
        self._rows: torch.Tensor | None = None
        """(B, T, hidden) that have come to the layer lately."""
        self._rows_from = 0
        """Position of the first of them."""
        self._call: RecurrentCall | None = None
        """The latest."""
        self._several = False
        """Whether that was over several rows: where those end, one may want to come back."""
        self.is_running = False
        """Whether its module is at work."""

    @property
    def is_initialized(self) -> bool:
        """Whether it has been given anything."""
        return any(self.has_previous_state.values())

    @property
    def nbytes(self) -> int:
        """Of its state."""
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return sum(one.nbytes for one in states if one is not None)

    def get_seq_length(self) -> int:
        """The cache's."""
        length: int = self._cache.length
        return length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of full attention."""
        return self._cache.length + query_length, 0

    def run(self, call: RecurrentCall, hidden: torch.Tensor) -> Any:
        """The module over the rows (B, T, hidden) that come at the cache's length.

        Raises: RuntimeError where the state does not stand there.
        """
        start, count = self.get_seq_length(), int(hidden.shape[1])
        if self._at != start:
            raise RuntimeError(f"a layer's state stands at position {self._at}, a forward begins at {start}")
        if count > 1 or self._several or start - self._checkpoints[-1].position >= _LOGGED:
            self._keep(start)
        self._call, self._several = call, count > 1
        out = self._advance(hidden, start)
        if count > _LOGGED:
            self._rows, self._rows_from = None, self._at
        else:
            self._rows = hidden.clone() if self._rows is None else torch.cat([self._rows, hidden], dim=1)
        return out

    @torch.inference_mode()
    def roll_back(self, length: int) -> None:
        """Come to the state before the token at this position.

        Raises: RuntimeError if it is not known any more.
        """
        if self._call is None:
            return
        found = next((one for one in reversed(self._checkpoints) if one.position <= length), None)
        if found is None or found.position < length < self._rows_from:
            raise RuntimeError(f"a layer's state at position {length} is not known any more")
        self._checkpoints = [one for one in self._checkpoints if one.position <= length]
        if self._rows is not None:
            self._rows = self._rows[:, : max(0, length - self._rows_from)]
        self._rows_from = min(self._rows_from, length)
        if self._at != length:
            self._restore(found)
            if found.position < length:
                assert self._rows is not None
                self._advance(self._rows[:, found.position - self._rows_from :], found.position)
            self._at = length
        self._keep(length)

    def _advance(self, hidden: torch.Tensor, start: int) -> Any:
        """What the latest call makes of these rows, whose first comes to the position `start`."""
        assert self._call is not None
        self._at, self.is_running = None, True
        try:
            out = self._call(hidden, self._cache)
        finally:
            self.is_running = False
        self._at = start + int(hidden.shape[1])
        return out

    def rows(self, stop: int) -> tuple[torch.Tensor, ...]:
        """See `SharedLengthCache`: a copy of the state. Raises: RuntimeError if it does not stand there."""
        if self._at != stop:
            raise RuntimeError(f"a layer's state stands at position {self._at}, asked for at {stop}")
        kept = _Checkpoint.of(self, stop)
        return (*kept.conv.values(), *kept.recurrent.values())

    def fill(self, rows: tuple[torch.Tensor, ...], stop: int) -> None:
        """See `SharedLengthCache`."""
        for i, one in enumerate(rows):
            place = i % self.number_of_states
            if i < self.number_of_states:
                self.lazy_initialization(conv_states=one, state_idx=place)
                self.conv_states[place].copy_(one)
                self.has_previous_state[place] = True
            else:
                self.lazy_initialization(recurrent_states=one, state_idx=place)
                self.recurrent_states[place].copy_(one)
        self._at = self._rows_from = stop
        self._checkpoints = [_Checkpoint.of(self, stop)]

    def _keep(self, position: int) -> None:
        """The present state, which stands there."""
        last = self._checkpoints[-1]
        if last.position == position:
            return
        self._checkpoints = [last, _Checkpoint.of(self, position)]
        if self._rows is not None and (num_old := last.position - self._rows_from) > 0:
            self._rows, self._rows_from = self._rows[:, num_old:], last.position

    def _restore(self, found: _Checkpoint) -> None:
        if not found.position:
            self.reset()
        for states, kept in ((self.conv_states, found.conv), (self.recurrent_states, found.recurrent)):
            for i, one in kept.items():
                states[i].copy_(one)


@contextmanager
def in_short_chunks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, what these compute over a few rows is not filled up to 64, whose cost a verification would have.

    The functions of a module's source file are exchanged, so other models of its kind do the same meanwhile.
    """
    files = {sys.modules[type(one).__module__] for one in modules}
    found = {(file, name): vars(file)[name] for file in files for name in _RULES if name in vars(file)}
    # Within another model's session of that kind there is nothing to do.
    before = {place: rule for place, rule in found.items() if not isinstance(rule, _InShortChunks)}
    try:
        for (file, name), rule in before.items():
            setattr(file, name, _InShortChunks(rule))
        yield
    finally:
        for (file, name), rule in before.items():
            setattr(file, name, rule)


@dataclass(frozen=True)
class _InShortChunks:
    rule: Callable[..., Any]

    def __call__(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.shape[1] < _CHUNK:
            kwargs["chunk_size"] = query.shape[1]
        return self.rule(query, *args, **kwargs)
