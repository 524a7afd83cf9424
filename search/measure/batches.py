"""How many texts that are decoded at once may each draft: as many as drafting was measured to be faster among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.config.decode_config import DecodeConfig
from search.measure.decoder import Decoder
from search.progress import Tell, nobody

SIZES = (2, 4, 8, 16)
"""Texts at once."""
MOST_TEXTS = 16


@dataclass(frozen=True)
class BatchSpeed:
    """Of so many texts at once; tokens a second of all together, their prompts in it."""

    size: int
    plain_tokens_per_s: float
    tokens_per_s: float
    """Where each drafts."""

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s

    def __str__(self) -> str:
        return f"{self.size} at once {self.speedup:.2f}x ({self.tokens_per_s:.0f} tokens/s)"


def batch_speeds(
    decoder: Decoder, prompts: Sequence[Sequence[int]], config: DecodeConfig, progress: Tell = nobody
) -> tuple[BatchSpeed, ...]:
    """Of the sizes in `SIZES` that there are prompts for, up to the first one at which drafting is not faster; up to
    `MOST_TEXTS` prompts. A step of many texts takes longer the more of each are verified, so it is not faster at a
    larger one either.

    Cost: two decodings of these prompts for a size, which share their forwards.
    """
    prompts, found = prompts[:MOST_TEXTS], list[BatchSpeed]()
    plain = DecodeConfig.plain(config.skip_mask.num_layers)
    for size in (one for one in SIZES if one <= len(prompts)):
        rates = [decoder.batch_rate(prompts, one, size) for one in (plain, config)]
        found.append(BatchSpeed(size, *rates))
        progress(len(found), len(SIZES))
        if found[-1].speedup <= 1.0:
            break
    return tuple(found)


def most_drafting(speeds: Sequence[BatchSpeed]) -> int:
    """Texts at once up to which drafting was faster; one alone is what the speedup was confirmed on."""
    return max([1, *(one.size for one in speeds if one.speedup > 1.0)])
