"""ForcedDrafter: of text with a grammar, what alone can follow is proposed without a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from layerskip.drafters.base import Draft, Drafter, DraftSession, Proposal
from layerskip.rounds.grammar import GrammarState
from layerskip.rounds.preparation import Starts

MOST_FORCED = 32
"""Tokens of a proposal."""


class ForcedDrafter:
    """The names of a JSON object's fields, say; else what another drafter proposes, as far as the grammar allows it.

    What is forced is verified like any draft: its keys and values have to be computed anyway.
    """

    def __init__(self, grammar: GrammarState, other: Drafter | None, most: int = MOST_FORCED) -> None:
        """other: None where nothing else is drafted; most: tokens of a proposal."""
        self.grammar, self.other, self.most = grammar, other, most

    @property
    def gamma(self) -> int:
        return self.most if self.other is None else max(self.most, self.other.gamma)

    @property
    def needs_target_prob(self) -> bool:
        return self.other is not None and self.other.needs_target_prob

    def prepare(self, starts: Starts) -> None:
        if self.other is not None:
            self.other.prepare(starts)

    def session(self, capacity: int) -> AbstractContextManager[None]:
        return nullcontext() if self.other is None else self.other.session(capacity)

    def begin(self) -> _ForcedSession:
        return _ForcedSession(self, None if self.other is None else self.other.begin())


class _ForcedSession:
    """See `DraftSession`."""

    def __init__(self, drafter: ForcedDrafter, other: DraftSession | None) -> None:
        self._drafter, self._other = drafter, other

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Proposal:
        grammar = self._drafter.grammar
        found = grammar.forced(context, min(limit, self._drafter.most))
        if found:
            return Draft(torch.tensor(found), looked_up=True)
        draft = None if self._other is None else self._other.propose(context, limit, target_prob)
        if not isinstance(draft, Draft) or draft.tree is not None:
            return draft
        count = grammar.num_allowed(context, draft.ids.tolist())
        return Draft(draft.ids[:count], looked_up=draft.looked_up) if count else None
