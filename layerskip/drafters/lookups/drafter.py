"""LookupDrafter: proposes what followed the text's last tokens before, without any forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from layerskip.config.lookup_settings import MAX_MATCH, LookupSettings, PromptLookup, SuffixLookup
from layerskip.drafters.base import Draft
from layerskip.drafters.lookups.text_store import TextStore
from layerskip.drafters.lookups.token_index import Match, TokenIndex, continue_from, vote
from layerskip.rounds.preparation import Starts


class LookupDrafter:
    """`prompt_lookup` and `suffix`: n-grams of the text so far, and for `suffix` of earlier texts too.

    Cost of a proposal: a hash for each token emitted since the last one, and some ten to a hundred microseconds on the
    host, whatever the text's length. Every token is a point mass, so verification is exact when sampling too.
    Ref: prompt lookup decoding (Saxena 2023); SuffixDecoding (2411.04975) for the vote, the factor and the least
    probability.
    """

    def __init__(
        self, settings: LookupSettings, gamma: int, target_threshold: float, store: TextStore | None = None
    ) -> None:
        """gamma, target_threshold: as in `DecodeConfig`, for this drafter. store: earlier texts, for `suffix`."""
        self._settings = settings
        self._gamma = gamma
        self._target_threshold = target_threshold
        self._store = store if isinstance(settings, SuffixLookup) else None

    @property
    def gamma(self) -> int:
        return self._gamma

    @property
    def needs_target_prob(self) -> bool:
        return self._target_threshold > 0.0

    def prepare(self, starts: Starts) -> None:
        """Nothing: lookups use no device."""

    def session(self, capacity: int) -> AbstractContextManager[None]:  # noqa: ARG002 (lookups keep tokens alone)
        """See `Drafter`."""
        return nullcontext()

    def begin(self) -> LookupSession:
        return LookupSession(self._settings, self._gamma, self._target_threshold, self._store)


class LookupSession:
    """See `DraftSession`."""

    def __init__(
        self, settings: LookupSettings, gamma: int, target_threshold: float, store: TextStore | None = None
    ) -> None:
        self._settings, self._gamma, self._target_threshold = settings, gamma, target_threshold
        self._store = store
        self._text: list[int] = []
        self._index = TokenIndex(settings.min_match)

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Draft | None:
        """See `DraftSession`. None where nothing matches, and while the target is unsure."""
        self.follow(context)
        if target_prob is not None and target_prob < self._target_threshold:
            return None
        tokens = self.look_up(limit)
        return Draft(torch.tensor(tokens), looked_up=True) if tokens else None

    def follow(self, context: Sequence[int]) -> None:
        """Index what the text has grown by."""
        self._index.grow(self._text, context[len(self._text) :])

    def look_up(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the last ones before; none where these are new."""
        settings, limit = self._settings, min(limit, self._gamma)
        longest = settings.max_match if isinstance(settings, PromptLookup) else MAX_MATCH
        match = self._longest(longest)
        if match is None:
            return []
        if isinstance(settings, SuffixLookup):
            limit = min(limit, int(settings.factor * match.length))
            futures = self._futures(match, limit)
            return vote(futures, settings.min_probability)
        if settings.continuation == "frequent":
            return vote(self._futures(match, limit), 0.0)
        return continue_from(match.places[0], limit, self._text)

    def _longest(self, longest: int) -> Match | None:
        """In the text itself, or in the store if a longer match is there."""
        own = self._index.match(self._text, longest)
        if self._store is None:
            return own
        other = self._store.match(self._text, self._settings.min_match, longest)
        if own is None or other is None:
            return own or other
        return other if other.length > own.length else own

    def _futures(self, match: Match, limit: int) -> list[list[int]]:
        return [continue_from(place, limit, self._text) for place in match.places]
