"""DraftModelDrafter: another, smaller model over the same token ids, with an engine and a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.drafters.base import Draft
from layerskip.drafters.chain import ChainDrafter, WeightsSettings
from layerskip.drafters.translation import Translation
from layerskip.engines.base import Engine
from layerskip.huggingface.adapter import widened
from layerskip.rounds.preparation import ForwardPlan, Starts
from layerskip.rounds.sampling import Sampler

_USUAL_CATCH_UP = (1, 2)
"""Tokens that it has not seen when a round begins: the target's own, and before it a draft's last where all were
right."""
OWN_FOR_ONE = 3
"""Tokens of a draft model with another tokenizer that there is room for to one of the target's; a text that takes more
is not drafted."""


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A model that drafts for another one."""

    engine: Engine
    fingerprint: str
    """See `DraftWeights`."""
    num_layers: int
    num_tokens: int
    """Ids that it knows; one that only the target has is read as the last of these."""
    vocabulary: int
    """Ids that the target knows; drafts are among them."""
    max_positions: int | None
    """Longest text that it is made for; beyond it nothing is drafted."""
    nbytes: int
    """Of the weights."""
    translation: Translation | None = None
    """Where its tokenizer is another one; its ids and vocabulary are then its own."""

    def session(self, capacity: int) -> AbstractContextManager[None]:
        """Of its engine, for a text of up to `capacity` of the target's tokens."""
        if self.translation is None:
            return self.engine.session(capacity)
        own = OWN_FOR_ONE * capacity
        return self.engine.session(own if self.max_positions is None else max(1, min(own, self.max_positions)))

    def room_after(self, length: int, wanted: int) -> int:
        """How many of the wanted tokens it may draft after a text of this length."""
        return wanted if self.max_positions is None else min(wanted, self.max_positions - length + 1)

    def mask(self, draft_vocab: int | None) -> SkipMask | None:
        """That its own engine is told; None for all that it knows."""
        if draft_vocab is None or draft_vocab >= self.num_tokens:
            return None
        return SkipMask.none(self.num_layers).narrowed(draft_vocab)

    def forward(
        self, ids: Sequence[int] | torch.Tensor, num_logits: int = 1, draft_vocab: int | None = None
    ) -> torch.Tensor:
        """(num_logits, V) of the last positions, as wide as the target's; the cache advances. In a session.

        draft_vocab: -inf but for the first so many token ids.
        """
        known = torch.as_tensor(ids, device=self.engine.device)
        if self.num_tokens < self.vocabulary:
            known = known.clamp(max=self.num_tokens - 1)
        logits = self.engine.forward(known, self.mask(draft_vocab), num_logits=num_logits)[:, : self.vocabulary]
        return widened(logits, self.vocabulary) if logits.shape[1] < self.vocabulary else logits


class DraftModelDrafter(ChainDrafter[WeightsSettings]):
    """A chain of up to gamma tokens.

    Cost: of a round, one forward of the draft model a token, the first over what the target has emitted since the last
    round too; the first round's goes over the prompt. Memory: its cache. Syncs as `ChainDrafter.chain`.
    """

    def __init__(self, model: DraftModel, sampler: Sampler, settings: WeightsSettings) -> None:
        super().__init__(sampler, settings)
        self._model = model

    def session(self, capacity: int) -> AbstractContextManager[None]:
        return self._model.session(capacity)

    def prepare(self, starts: Starts) -> None:
        if starts.rounds:
            mask = self._model.mask(self.settings.draft_vocab)
            self._model.engine.prepare([ForwardPlan(mask, count, starts.rounds) for count in _USUAL_CATCH_UP])

    def begin(self) -> DraftModelSession:
        return DraftModelSession(self, self._model)


class DraftModelSession:
    """See `DraftSession`."""

    def __init__(self, drafter: DraftModelDrafter, model: DraftModel) -> None:
        self._drafter, self._model = drafter, model
        self._num_seen = 0
        """Tokens of the text that its cache holds."""
        self._drafted = torch.empty(0, dtype=torch.long)
        """Tokens that it holds after them, right or wrong."""

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Draft | None:
        """See `DraftSession`. None while the target is unsure, as `target_threshold` says."""
        limit = self._model.room_after(len(context), min(limit, self._drafter.gamma))
        if limit < 1 or not self._drafter.is_sure(target_prob):
            return None
        self._catch_up(context)
        draft = self._drafter.chain(context, limit, lambda last: self._go_on(context, last))
        self._num_seen, self._drafted = len(context), draft.ids[:-1]
        return draft

    def forget_from(self, position: int) -> None:
        """The next round goes over the tokens behind this position again."""
        self._num_seen, self._drafted = min(position + 1, self._num_seen), self._drafted[:0]

    def _catch_up(self, context: Sequence[int]) -> None:
        """Keep what it has seen of this text, the last round's drafts as far as they were right; all but the last
        token of it at most."""
        same = self._num_seen
        for token in self._drafted.tolist():
            if same + 1 >= len(context) or context[same] != token:
                break
            same += 1
        self._num_seen = same
        self._model.engine.cache.rollback_to(same)

    def _go_on(self, context: Sequence[int], last: torch.Tensor | None) -> torch.Tensor:
        ids = context[self._num_seen :] if last is None else last
        return self._model.forward(ids, draft_vocab=self._drafter.settings.draft_vocab)
