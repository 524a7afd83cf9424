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


class LookupReader:
    """Reads lookups on texts, and keeps what it has read of each.

    Cost: a lookup a token, some ten microseconds each, the first time.
    """

    def __init__(self, gamma: int) -> None:
        """gamma: most tokens of a proposal."""
        self._gamma = gamma
        self._kept: dict[tuple[ForcedText, LookupSettings], Ints] = {}

    def read(self, texts: Sequence[ForcedText], settings: LookupSettings, width: int) -> LookupReadings:
        """`width` columns, at least the longest continuation's."""
        found = np.zeros((2, len(texts), width), dtype=np.int64)
        for place, text in enumerate(texts):
            key = text, settings
            if key not in self._kept:
                self._kept[key] = self._read_text(text, settings)
            found[:, place, : len(text.continuation_ids)] = self._kept[key]
        return LookupReadings(*found)

    def _read_text(self, text: ForcedText, settings: LookupSettings) -> Ints:
        """(2, T): tokens proposed, and how many of them are right."""
        context, gamma = list(text.prompt_ids), self._gamma
        session = LookupSession(settings, gamma, 0.0)
        rows = []
        for row, token in enumerate(text.continuation_ids):
            context.append(token)
            session.follow(context)
            tokens = session.look_up(gamma)
            rows.append((len(tokens), _common_start(tokens, text.continuation_ids[row + 1 : row + 1 + gamma])))
        return np.array(rows, dtype=np.int64).reshape(-1, 2).T


def _common_start(tokens: Sequence[int], following: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, following, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(following)))
