"""StatesEngine: an engine that hands out the target's hidden states, for drafters that go on from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from layerskip.config.skip_mask import SkipMask
from layerskip.engines.base import Engine
from layerskip.huggingface.adapter import ModelAdapter, widened
from layerskip.rounds.preparation import ForwardPlan


class StatesEngine(Engine):
    """What drafting from hidden states needs of an engine: the target's states, and the ends of the model."""

    def __init__(self, adapter: ModelAdapter) -> None:
        super().__init__(adapter)
        self._states: torch.Tensor | None = None
        self._kept_layers: tuple[int, ...] = ()

    @property
    def states(self) -> torch.Tensor:
        """(capacity, layers kept * hidden): of the running session what the target's layers gave, the last one before
        the final norm, side by side, at every position that counts in the cache."""
        if self._states is None:
            raise RuntimeError("no hidden states: call `keep_states` at the beginning of the session")
        return self._states

    def keep_states(self, aux_layers: Sequence[int] = (), rows: torch.Tensor | None = None) -> None:
        """Keep those of these layers, counted from 0, and then of the last one from now on, in a session that has not
        begun its text.

        rows: where to keep them, see `new_states`, which makes them where none are given.
        """
        self._kept_layers = (*aux_layers, self._adapter.num_layers - 1)
        self._states = self.new_states(self.cache.capacity, len(self._kept_layers)) if rows is None else rows

    def new_states(self, num_positions: int, num_layers: int) -> torch.Tensor:
        """Room for the states of so many layers at so many positions."""
        like: torch.Tensor = self._ends[0].weight
        width = num_layers * self._adapter.text_config.hidden_size
        return torch.empty((num_positions, width), dtype=like.dtype, device=self.device)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Whose states are kept, in the running session."""
        return self._kept_layers if self._keeps_states else ()

    def prepare_unembed(self, draft_vocab: int | None) -> None:
        """What `unembed` then computes with, made before a clock runs."""
        mask = SkipMask.none(self._adapter.num_layers).narrowed(draft_vocab)
        self.prepare([ForwardPlan(mask, 1, range(0))])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(T, embedding): rows of the input embedding, unscaled."""
        return F.embedding(ids, self._ends[0].weight)

    def unembed(self, hidden: torch.Tensor, draft_vocab: int | None = None) -> torch.Tensor:
        """(T, V): a draft's logits of hidden states (T, hidden) that have been normed; with `draft_vocab` -inf but for
        the first so many token ids."""
        head = self._ends[1]
        if draft_vocab is None:
            return F.linear(hidden, head.weight, head.bias)
        bias = None if head.bias is None else head.bias[:draft_vocab]
        return widened(F.linear(hidden, head.weight[:draft_vocab], bias), len(head.weight))

    @property
    def _ends(self) -> tuple[Any, Any]:
        model: Any = self._adapter.model
        return model.get_input_embeddings(), model.get_output_embeddings()

    @property
    def _keeps_states(self) -> bool:
        return self._states is not None

    def prepare_trees(self, starts: range, most: int) -> None:
        """See `Engine`: nothing is."""

    def keep_rows(self, sources: Sequence[int], place: int) -> None:
        """See `Engine`."""
        self.cache.move(sources, place)
        if self._keeps_states:
            self.states[place : place + len(sources)] = self.states[list(sources)]

    def _keep(self, start: int, states: Sequence[torch.Tensor]) -> None:
        """Of each kept layer the rows (T, hidden) from position `start` on."""
        rows = self.states[start : start + len(states[0])].view(len(states[0]), len(states), -1)
        for i, one in enumerate(states):
            rows[:, i] = one

    def _end_session(self) -> None:
        self._cache = self._states = None
