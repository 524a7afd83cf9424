"""ChainDrafter: what drafters that compute one token after the other share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from layerskip.rounds.sampling import Sampler, top_probability


@dataclass(frozen=True)
class ChainSettings:
    """What a computed draft follows; fields as in `DecodeConfig`."""

    gamma: int
    draft_threshold: float = 0.0
    target_threshold: float = 0.0


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
    ) -> list[torch.Tensor]:
        """Up to `count` tokens (1,) after the context; see `steps`."""
        return [token for token, _ in self.steps(context, count, next_logits)]

    def steps(
        self, context: Sequence[int], count: int, next_logits: Callable[[torch.Tensor | None], torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, float | None]]:
        """One token (1,) after the other, up to `count`, and the top probability where a threshold looks at it.

        next_logits: (1, V) after the token just drafted, or after the context for None. Cost: one device sync a token
        with a threshold or a penalty, else none.
        """
        sampler, threshold = self._sampler, self._settings.draft_threshold
        needs_ids = sampler.params.repetition_penalty != 1.0
        seen, last = list(context) if needs_ids else context, None
        for place in range(len(context), len(context) + count):
            logits = sampler.shape(next_logits(last), seen)
            last = sampler.choose(logits, place)
            if needs_ids:
                seen = [*seen, int(last)]
            sure = float(top_probability(logits)) if threshold > 0.0 else None
            yield last, sure
            if sure is not None and sure < threshold:
                break
