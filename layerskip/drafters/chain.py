"""ChainDrafter: what drafters that compute one token after the other share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from layerskip.drafters.base import Draft
from layerskip.rounds.sampling import Sampler, top_probability


@dataclass(frozen=True)
class ChainSettings:
    """What a computed draft follows; fields as in `DecodeConfig`."""

    gamma: int
    draft_threshold: float = 0.0
    target_threshold: float = 0.0
    siblings: int = 0


@dataclass(frozen=True)
class WeightsSettings(ChainSettings):
    """What a draft by trained weights follows besides."""

    draft_vocab: int | None = field(default=None, kw_only=True)
    """See `DraftWeights`."""


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
        """Up to `count` tokens after the context, and what comes next best in the place of each, where that is asked;
        see `steps`."""
        steps = list(self.steps(context, count, next_logits))
        siblings = [one.siblings for one in steps if one.siblings is not None]
        return Draft(torch.cat([one.token for one in steps]), siblings=torch.cat(siblings) if siblings else None)

    def steps(
        self, context: Sequence[int], count: int, next_logits: Callable[[torch.Tensor | None], torch.Tensor]
    ) -> Iterator[Step]:
        """One token after the other, up to `count`.

        next_logits: (1, V) after the token just drafted, or after the context for None. Cost: one device sync a token
        with a threshold or a penalty, else none.
        """
        sampler, threshold, num_siblings = self._sampler, self._settings.draft_threshold, self._settings.siblings
        needs_ids = sampler.params.repetition_penalty != 1.0
        seen, last = list(context) if needs_ids else context, None
        for place in range(len(context), len(context) + count):
            logits = sampler.shape(next_logits(last), seen)
            last = sampler.choose(logits, place)
            if needs_ids:
                seen = [*seen, int(last)]
            sure = float(top_probability(logits)) if threshold > 0.0 else None
            yield Step(last, sure, sampler.siblings(logits, place, last, num_siblings) if num_siblings else None)
            if sure is not None and sure < threshold:
                break


@dataclass(frozen=True, eq=False)
class Step:
    """One drafted token, (1,)."""

    token: torch.Tensor
    sure: float | None
    """The top probability, where a threshold looks at it."""
    siblings: torch.Tensor | None
    """(1, k): what comes next best in its place; None where that is not asked."""
