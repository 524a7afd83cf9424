"""ChainDrafter: what drafters that compute one token after the other share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from layerskip.drafters.base import Draft
from layerskip.rounds.sampling import Sampler, top_probability
from layerskip.rounds.verifier import TreeDraft


@dataclass(frozen=True)
class ChainSettings:
    """What a computed draft follows; fields as in `DecodeConfig`."""

    gamma: int
    draft_threshold: float = 0.0
    target_threshold: float = 0.0
    siblings: int = 0
    sibling_threshold: float = 1.0

    @property
    def watches_confidence(self) -> bool:
        """See `DecodeConfig`."""
        return self.draft_threshold > 0.0 or self.sibling_threshold < 1.0

    def branches_at(self, sure: float | None) -> bool:
        """Whether a token of this top probability has siblings."""
        everywhere = self.sibling_threshold == 1.0
        return self.siblings > 0 and (everywhere or (sure is not None and sure < self.sibling_threshold))


@dataclass(frozen=True)
class WeightsSettings(ChainSettings):
    """What a draft by trained weights follows besides."""

    draft_vocab: int | None = field(default=None, kw_only=True)
    """See `DraftWeights`."""
    tree_tokens: int = field(default=0, kw_only=True)

    @property
    def room(self) -> int:
        """Keys and values that a draft of an `eagle` leaves besides those of the text's positions."""
        return self.gamma * self.tree_tokens


SettingsT = TypeVar("SettingsT", bound=ChainSettings)


class ChainDrafter(Generic[SettingsT]):
    """When a draft begins and where it stops.

    `draft_threshold`: drafting stops *after* the first token whose distribution has a top probability below it. The
    low-confidence token stays in the draft: its forward is paid for already.
    """

    def __init__(self, sampler: Sampler, settings: SettingsT) -> None:
        self._sampler = sampler
        self._settings = settings

    @property
    def gamma(self) -> int:
        return self._settings.gamma

    @property
    def settings(self) -> SettingsT:
        return self._settings

    @property
    def rows(self) -> torch.Tensor | slice | None:
        """The token ids alone that its logits are finite at, where these are few."""
        return None

    @property
    def needs_target_prob(self) -> bool:
        return self._settings.target_threshold > 0.0

    def session(self, capacity: int) -> AbstractContextManager[None]:  # noqa: ARG002 (the target's own is enough)
        """See `Drafter`."""
        return nullcontext()

    def is_sure(self, target_prob: float | None) -> bool:
        """Whether the target is sure enough of its last token to draft on it."""
        return target_prob is None or target_prob >= self._settings.target_threshold

    def chain(
        self, context: Sequence[int], count: int, next_logits: Callable[[torch.Tensor | None], torch.Tensor]
    ) -> Draft:
        """Up to `count` tokens after the context, and what comes next best in their places, where that is asked; see
        `steps`."""
        steps = list(self.steps(context, count, next_logits))
        ids = torch.cat([one.token for one in steps])
        siblings = {place: one.siblings.flatten() for place, one in enumerate(steps) if one.siblings is not None}
        if not siblings:
            return Draft(ids)
        parents = [*range(len(ids)), *(place for place, found in siblings.items() for _ in found)]
        return Draft(ids, tree=TreeDraft(torch.cat([ids, *siblings.values()]), tuple(parents), len(ids)))

    def steps(
        self, context: Sequence[int], count: int, next_logits: Callable[[torch.Tensor | None], torch.Tensor]
    ) -> Iterator[Step]:
        """One token after the other, up to `count`.

        next_logits: (1, V) after the token just drafted, or after the context for None. Cost: one device sync a token
        with a threshold, a penalty or a grammar, else none.
        """
        sampler, own = self._sampler, self._settings
        needs_ids = sampler.reads_text
        rows = None if own.siblings else self.rows
        seen, last = list(context) if needs_ids else [], None
        for place in range(len(context), len(context) + count):
            logits = next_logits(last)
            if rows is None:
                logits = sampler.shape(logits, seen)
                last = sampler.choose(logits, place)
            else:
                logits, last = sampler.choose_among(logits, seen, rows, place)
            if needs_ids:
                seen.append(int(last))
            sure = float(top_probability(logits)) if own.watches_confidence else None
            siblings = sampler.siblings(logits, place, last, own.siblings) if own.branches_at(sure) else None
            yield Step(last, sure, siblings)
            if sure is not None and sure < own.draft_threshold:
                break


@dataclass(frozen=True, eq=False)
class Step:
    """One drafted token, (1,)."""

    token: torch.Tensor
    sure: float | None
    """The top probability, where a threshold looks at it."""
    siblings: torch.Tensor | None
    """(1, k): what comes next best in its place; None where it has none."""
