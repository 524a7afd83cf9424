"""TokenIndex: where the tokens that end a text occurred before, in it or in other texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerskip.config.lookup_settings import MAX_MATCH

MAX_PLACES = 32
"""Places that are compared at a time, the most recent ones: a bound on the time of a proposal."""


class Place(NamedTuple):
    """A position of a text; what stands from there on continues what stands before it."""

    text: list[int]
    position: int


@dataclass(frozen=True)
class Match:
    """The places that share the most tokens with the end of a text, the most recent one first."""

    places: tuple[Place, ...]
    length: int
    """Tokens that they share, up to the longest that was asked for."""


class TokenIndex:
    """Places of growing texts, by the `num_tokens` tokens before them.

    Cost: `grow` and `add` a hash of `num_tokens` numbers a token, whatever the text's length; memory grows with the
    tokens. `match` compares at most `MAX_PLACES` places.
    """

    def __init__(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens: must be at least 1, got {num_tokens}")
        self._num_tokens = num_tokens
        self._places: dict[tuple[int, ...], list[Place]] = {}

    def grow(self, text: list[int], ids: Sequence[int]) -> None:
        """Append `ids` to `text`, of which this index knows all tokens so far."""
        start = len(text)
        text += ids
        self.add(text, start)

    def add(self, text: list[int], start: int = 0) -> None:
        """Index the tokens of `text` from position `start` on; those before it are indexed already."""
        size = self._num_tokens
        for position in range(max(start, size), len(text)):
            key = tuple(text[position - size : position])
            self._places.setdefault(key, []).append(Place(text, position))

    def drop_oldest(self, text: list[int]) -> None:
        """Forget the text that was added before all others. Cost: a pass over its tokens."""
        size = self._num_tokens
        for key, count in Counter(tuple(text[i - size : i]) for i in range(size, len(text))).items():
            places = self._places[key]
            del places[:count]
            if not places:
                del self._places[key]

    def match(self, text: Sequence[int], longest: int = MAX_MATCH) -> Match | None:
        """The places before which most of the tokens that end `text` stand; None if fewer than `num_tokens` do.

        Of more than `MAX_PLACES` places the most recent ones are looked at. A match longer than `longest` counts as
        that long.
        """
        if len(text) < self._num_tokens:
            return None
        found = self._places.get(tuple(text[len(text) - self._num_tokens :]))
        if not found:
            return None
        recent = found[: -MAX_PLACES - 1 : -1]
        lengths = [_common_suffix(place, text, self._num_tokens, longest) for place in recent]
        length = max(lengths)
        return Match(tuple(place for place, one in zip(recent, lengths, strict=True) if one == length), length)


def _common_suffix(place: Place, text: Sequence[int], known: int, longest: int) -> int:
    """Tokens before the place that are also the last of `text`; `known` of them are known to be."""
    other, stop = place
    end = len(text)
    longest = max(known, min(longest, stop, end))
    if other[stop - longest : stop] == text[end - longest :]:
        return longest
    length = known
    while other[stop - length - 1] == text[end - length - 1]:
        length += 1
    return length


def continue_from(place: Place, num_tokens: int, growing: list[int] | None = None) -> list[int]:
    """What follows a place, up to `num_tokens`. Where the `growing` text ends, what is copied goes on: a loop is
    continued as a loop. Other texts have ended where they end."""
    text, position = place
    copied = text[position : position + num_tokens]
    period = len(copied)
    while text is growing and 0 < len(copied) < num_tokens:
        copied.append(copied[len(copied) - period])
    return copied


def vote(futures: Sequence[Sequence[int]], min_probability: float) -> list[int]:
    """Token by token what most of the futures go on with, those that disagree leaving the vote.

    Ends where the share of the futures that have agreed so far is below `min_probability`, or none goes on. Of tokens
    with equally many votes the one of the first future is taken.
    """
    voters, tokens, least = list(futures), list[int](), min_probability * len(futures)
    while voters := [future for future in voters if len(future) > len(tokens)]:
        at = len(tokens)
        if len(voters) == 1:  # nobody to disagree any more
            return tokens + list(voters[0][at:]) if least <= 1 else tokens
        column = [future[at] for future in voters]
        token, votes = Counter(column).most_common(1)[0]
        if votes < least:
            break
        tokens.append(token)
        if votes < len(voters):
            voters = [future for future in voters if future[at] == token]
    return tokens
