"""Seconds by position in the continuation, plain against speculative: what a text's length does to the speedup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from search.measure.pairs import Pair

MAX_BINS = 64


@dataclass(frozen=True)
class SecondsByPosition:
    """Of many decodings added up, in equal bins of tokens. A position of a text counts where both ways reached it.

    Tokens of one round share its seconds evenly, see `DecodeStats.token_s`.
    """

    bin_tokens: int
    """Of one text, in every bin but the last, which may hold fewer. The first bin begins with a text's second token:
    the first comes from the prefill."""
    longest: int
    """Tokens of the longest text that both ways reached, its first one included."""
    num_tokens: tuple[int, ...]
    """Per bin, counted over all decodings; the seconds are theirs."""
    plain_s: tuple[float, ...]
    speculative_s: tuple[float, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last token of each bin, counted from 1 within a text."""
        starts = range(2, self.longest + 1, self.bin_tokens)
        return [(start, min(start + self.bin_tokens - 1, self.longest)) for start in starts]

    @property
    def speedups(self) -> list[float]:
        """Within each bin alone."""
        return [one / other for one, other in zip(self.plain_s, self.speculative_s, strict=True)]

    @property
    def speedups_up_to(self) -> list[float]:
        """Of all tokens up to each bin's end: of the same texts, had they been cut there."""
        sums = accumulate(self.plain_s), accumulate(self.speculative_s)
        return [one / other for one, other in zip(*sums, strict=True)]


def seconds_by_position(pairs: Sequence[Pair]) -> SecondsByPosition | None:
    """What the pairs' tokens took, by their position; None where no text has a timed token."""
    both = [list(zip(one.plain.stats.token_s, one.speculative.stats.token_s, strict=False)) for one in pairs]
    num_timed = max(map(len, both), default=0)
    if num_timed == 0:
        return None
    width = -(-num_timed // MAX_BINS)
    num_bins = -(-num_timed // width)
    num_tokens, plain_s, speculative_s = [0] * num_bins, [0.0] * num_bins, [0.0] * num_bins
    for text in both:
        for position, (plain, speculative) in enumerate(text):
            place = position // width
            num_tokens[place] += 1
            plain_s[place] += plain
            speculative_s[place] += speculative
    return SecondsByPosition(width, num_timed + 1, tuple(num_tokens), tuple(plain_s), tuple(speculative_s))
