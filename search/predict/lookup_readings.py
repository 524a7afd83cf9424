"""What lookups would propose along known texts, and how much of it is right: exact, and without any forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerskip.analysis.teacher_forcing import ForcedText
from layerskip.config.lookup_settings import LookupSettings
from layerskip.drafters.lookups.drafter import LookupSession

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LookupReadings:
    """Of P texts, by the continuation token (P, T) that a round starts from.

    A proposal of fewer tokens is the beginning of a longer one, so these answer for every smaller gamma too.
    """

    proposed: Ints
    """Tokens proposed, up to the gamma that was asked for."""
    right: Ints
    """How many of them, from the first one on, are the text's own next tokens."""

    def select(self, texts: Sequence[int]) -> LookupReadings:
        """The texts at these places."""
        return LookupReadings(self.proposed[list(texts)], self.right[list(texts)])

    def narrowed(self, width: int) -> LookupReadings:
        """The first `width` columns."""
        return LookupReadings(self.proposed[:, :width], self.right[:, :width])


def read_lookups(texts: Sequence[ForcedText], settings: LookupSettings, gamma: int, width: int) -> LookupReadings:
    """`width` columns, at least the longest continuation's.

    Cost: a lookup a token, some ten microseconds each.
    """
    proposed, right = np.zeros((2, len(texts), width), dtype=np.int64)
    for place, text in enumerate(texts):
        context = list(text.prompt_ids)
        session = LookupSession(settings, gamma, 0.0)
        for row, token in enumerate(text.continuation_ids):
            context.append(token)
            session.follow(context)
            tokens = session.look_up(gamma)
            proposed[place, row] = len(tokens)
            right[place, row] = _common_start(tokens, text.continuation_ids[row + 1 : row + 1 + gamma])
    return LookupReadings(proposed, right)


def _common_start(tokens: Sequence[int], following: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, following, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(following)))
