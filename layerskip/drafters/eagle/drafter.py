"""EagleDrafter: weights go on from the target's own hidden states, one decoder layer a token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from layerskip.drafters.base import Draft
from layerskip.drafters.chain import ChainDrafter, WeightsSettings
from layerskip.drafters.eagle.lean import LeanHead
from layerskip.drafters.eagle.recorded import StaticText, static_text
from layerskip.drafters.eagle.state_head import StateHead, StateText
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.states import StatesEngine
from layerskip.rounds.preparation import Starts
from layerskip.rounds.sampling import Sampler


class EagleDrafter(ChainDrafter[WeightsSettings]):
    """A chain of up to gamma tokens.

    Cost: of a round, one layer over what the target has emitted since the last one and one layer a further token, and
    the target's output embedding a token; the first round's layer goes over the prompt. Syncs as `ChainDrafter.chain`.
    """

    def __init__(self, head: StateHead, engine: StatesEngine, sampler: Sampler, settings: WeightsSettings) -> None:
        super().__init__(sampler, settings)
        self._head, self._engine = head, engine
        self._static: StaticText | None = None

    def prepare(self, starts: Starts) -> None:
        self._engine.keep_states(self._head.aux_layers)
        self._head.prepare_unembed(self._engine, self.settings.draft_vocab)
        if isinstance(self._engine, CudaGraphEngine):
            self._static = self._recorded_text(self._engine)
            self._static.prepare(starts.rounds)

    def new_text(self) -> StateText:
        """For the running session."""
        if isinstance(self._engine, CudaGraphEngine):
            # What was prepared, for others may have needed larger buffers since.
            return self._static or self._recorded_text(self._engine)
        return self._head.new_text(self._engine.cache.capacity + self.settings.room)

    def _recorded_text(self, engine: CudaGraphEngine) -> StaticText:
        assert isinstance(self._head, LeanHead)  # no other is loaded for this engine
        return static_text(self._head, engine, self.settings)

    def begin(self) -> EagleSession:
        return EagleSession(self, self._engine)

    def draft(self, text: StateText, state: torch.Tensor, context: Sequence[int], count: int) -> Draft:
        """Up to `count` tokens after the context; state: (1, hidden) of its last token."""
        engine, place = self._engine, self._engine.cache.length

        def next_logits(last: torch.Tensor | None) -> torch.Tensor:
            nonlocal state, place
            if last is not None:
                state = text.go_on(engine, last, state, place)
                place += 1
            return text.logits(engine, state, self.settings.draft_vocab)

        return self.chain(context, count, next_logits)


class EagleSession:
    """See `DraftSession`."""

    def __init__(self, drafter: EagleDrafter, engine: StatesEngine) -> None:
        self._drafter, self._engine = drafter, engine
        self._num_done = 0
        """Positions whose keys and values come from the target's states."""

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Draft | None:
        """See `DraftSession`. None while the target is unsure, as `target_threshold` says."""
        if limit < 1 or not self._drafter.is_sure(target_prob):
            return None
        state = self._follow(context)
        return self._drafter.draft(self._text, state, context, min(limit, self._drafter.gamma))

    def forget_from(self, position: int) -> None:
        """The next round goes over the tokens behind this position, and the states before them, again."""
        self._num_done = min(self._num_done, position)

    def _follow(self, context: Sequence[int]) -> torch.Tensor:
        """Go over what the target has computed since the last round; (1, hidden) of its last position."""
        first, self._num_done = self._num_done, self._engine.cache.length
        ids = torch.tensor(context[first + 1 : self._num_done + 1], device=self._engine.device)
        return self._text.follow(self._engine, ids, first)

    @cached_property
    def _text(self) -> StateText:
        return self._drafter.new_text()
