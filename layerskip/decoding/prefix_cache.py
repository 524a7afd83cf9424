"""PrefixCache: keys and values of earlier texts, so that a prompt which begins like one of them goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerskip.engines import Engine

Ids = NDArray[np.int64]

_HEAD = 4
"""Tokens: texts that do not share so many save each other nothing worth keeping, and are told apart at once."""


@dataclass(frozen=True, eq=False)
class _Text:
    """The beginning of a text, of which the target has computed all layers."""

    ids: Ids
    rows: list[tuple[torch.Tensor, ...]]
    """Keys and values (B, heads, T, head_dim) by layer, or its state."""
    has_parts: bool
    """Whether its beginnings can be gone on from, too."""
    states: torch.Tensor | None
    """(T, layers kept * hidden), of these layers, where a drafter read them."""
    kept_layers: tuple[int, ...]
    engine: str
    """Which computed it: it may keep rows, and states, in a form of its own."""

    @cached_property
    def head(self) -> bytes:
        return _head_of(self.ids)

    @cached_property
    def num_bytes(self) -> int:
        tensors = [one for pair in self.rows for one in pair] + ([] if self.states is None else [self.states])
        return sum(one.nbytes for one in tensors)

    def serves(self, engine: Engine) -> bool:
        """Whether the engine's session, which keeps some layers' states or none, can go on from it."""
        has_states = not engine.kept_layers or self.kept_layers == engine.kept_layers
        return has_states and self.engine == engine.name

    def num_common(self, ids: Ids) -> int:
        """Tokens that both begin with."""
        most = min(len(ids), len(self.ids))
        other = np.flatnonzero(self.ids[:most] != ids[:most])
        return int(other[0]) if len(other) else most

    def num_usable(self, ids: Ids) -> int:
        """Tokens of a text that begins with these which it saves."""
        count = self.num_common(ids)
        return count if self.has_parts or count == len(self.ids) else 0


def _head_of(ids: Ids) -> bytes:
    return ids[:_HEAD].tobytes()


class PrefixCache:
    """Keys and values of one model's latest texts, prompts and what followed, up to `max_bytes`.

    Give it to every `generate` or `stream` of a conversation: each adds its text, and only what a prompt has beyond the
    longest beginning it shares with one of them is computed. All of the prompt where a drafter reads hidden states that
    were not kept; a `draft_model` goes over the whole prompt itself. Where layers keep a state in place of keys, only a
    whole text is gone on from. Not for several threads at a time.

    Cost: a copy of the rows on the model's device when a prompt is computed and when its text ends, and one when
    another begins like it. Texts that a newer one continues make room for it, then the oldest. Texts of fewer than 4
    tokens are not kept.
    The output is the same as without, on an engine that is not `batch_invariant` up to rounding: a prompt computed in
    two pieces rounds in other places than in one, which can flip near-ties in bfloat16 and float16.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes: must be at least 1, got {max_bytes}")
        self._max_bytes = max_bytes
        self._texts: list[_Text] = []
        """The oldest first."""
        self._model: Any = None

    @property
    def num_bytes(self) -> int:
        """Kept at present."""
        return sum(text.num_bytes for text in self._texts)

    def check_model(self, model: Any) -> None:
        """Remember whose texts these are. Raises: ValueError if they are another model's."""
        if self._model is not None and self._model is not model:
            raise ValueError("prefix_cache: holds another model's keys and values; make one for each model")
        self._model = model

    def fill(self, engine: Engine, prompt_ids: Sequence[int]) -> int:
        """Put the longest known beginning of a prompt into the session's empty cache; returns its tokens.

        At least the last token is left to compute, whose logits begin the text. No device sync.
        """
        ids = np.asarray(prompt_ids[:-1], dtype=np.int64)
        head = _head_of(ids)
        able = [text for text in self._texts if text.head == head and text.serves(engine)]
        found = max(able, key=lambda text: text.num_usable(ids), default=None)
        count = 0 if found is None else found.num_usable(ids)
        if found is None or not count:
            return 0
        engine.cache.fill(found.rows, count)
        if engine.kept_layers:
            assert found.states is not None
            engine.states[:count] = found.states[:count]
        self._texts.remove(found)
        self._texts.append(found)
        return count

    def keep(self, engine: Engine, ids: Sequence[int]) -> None:
        """Add the session's text, all of it that is in the cache or as much of it as there may be."""
        if not engine.cache.length:
            return
        cache, layers = engine.cache, engine.kept_layers
        num_bytes, room = cache.bytes_per_position, self._max_bytes - cache.state_bytes
        if layers:
            num_bytes += engine.states[:1].nbytes
        count = min(cache.length, len(ids), max(0, room) // num_bytes)
        known = np.asarray(ids[:count], dtype=np.int64)
        if count < _HEAD or (count < cache.length and not cache.keeps_rows):
            return
        alike = [text for text in self._texts if text.head == _head_of(known)]
        if any(text.serves(engine) and text.num_usable(known) == count for text in alike):
            return
        for text in alike:
            if text.num_common(known) == len(text.ids) and text.kept_layers in ((), layers) and text.has_parts:
                self._texts.remove(text)
        held, num_old = self.num_bytes, 0
        while num_old < len(self._texts) and held + count * num_bytes > room:
            held -= self._texts[num_old].num_bytes
            num_old += 1
        del self._texts[:num_old]
        states = engine.states[:count].clone() if layers else None
        self._texts.append(_Text(known, cache.rows(count), cache.keeps_rows, states, layers, engine.name))
