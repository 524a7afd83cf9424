"""Warm starts: configs worth measuring before any sampler has seen a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.config.skip_mask import SkipMask
from layerskip.config.usual_lookups import NGRAMS, lookup_alone, lookup_else
from search.study.space import SearchSpace
from search.study.trials import key_of

_EXITS = (1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
"""Share of the layers that an early exit keeps."""


@dataclass(frozen=True)
class WarmStart:
    """A named point of the space."""

    origin: str
    params: dict[str, Any]


def warm_starts(space: SearchSpace) -> tuple[WarmStart, ...]:
    """A config of every drafter that looks up, and about a dozen known shapes at a plausible gamma and draft threshold,
    duplicates removed.

    The cheap draft of an early exit is often wrong, so it gets a short gamma and a threshold; a mask that keeps most
    layers gets a longer one. The search moves both from there.
    """
    count = space.num_layers
    half = count // 2
    later, early_half = range(half, count - 1), range(half)
    shapes: list[tuple[str, SkipMask, int, float]] = [("no-skip", SkipMask.none(count), 1, 0.0)]
    names = {8: "eight-bits", 4: "four-bits"}
    rounded = [(names[bits], SkipMask.none(count).rounded(bits)) for bits in space.draft_bits]
    shapes += [(name, mask, 4, 0.0) for name, mask in rounded]
    for size in dict.fromkeys((*space.draft_vocabs[-1:], *space.draft_vocabs[2:3])):
        shapes += [(f"{name}-{size}-ids", space.narrowed(mask, size), 4, 0.0) for name, mask in rounded]
    for exit_layer in dict.fromkeys(max(1, round(count * part)) for part in _EXITS):
        gamma = 3 if exit_layer * 4 <= count else 5
        shapes.append((f"early-exit-{exit_layer}", SkipMask.early_exit(count, exit_layer), gamma, 0.4))
    shapes += [
        ("alternating", SkipMask.alternating(count), 4, 0.4),
        ("middle-third", SkipMask.contiguous(count, (count - count // 3) // 2, count // 3), 5, 0.4),
        ("middle-half", SkipMask.contiguous(count, (count - half) // 2, half), 4, 0.4),
        ("later-half-but-last", SkipMask.from_layers(count, later), 4, 0.4),
        ("later-attention", SkipMask.from_sublayers(count, attention=range(half, count)), 6, 0.5),
        ("later-mlp", SkipMask.from_sublayers(count, mlp=later), 5, 0.4),
        ("early-attention", SkipMask.from_sublayers(count, attention=early_half[1:]), 5, 0.4),
    ]
    starts: dict[tuple[tuple[str, Any], ...], WarmStart] = {}
    found = _lookup_starts(space)
    if "layer_skip" in space.drafters:
        found += [
            (origin, DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=threshold))
            for origin, mask, gamma, threshold in shapes
        ]
    for origin, config in found:
        params = space.to_params(config)
        starts.setdefault(key_of(params), WarmStart(origin, params))
    return tuple(starts.values())


def _lookup_starts(space: SearchSpace) -> list[tuple[str, DecodeConfig]]:
    """What the field uses: n-grams of 2 tokens and more, a suffix with a factor, and n-grams before a middling mask."""
    count = space.num_layers
    middle = DecodeConfig(skip_mask=SkipMask.contiguous(count, count // 4, 1), gamma=3, draft_threshold=0.4)
    suffix = SuffixLookup(min_match=2, factor=4.0, min_probability=0.1)
    starts = {
        "prompt_lookup": lookup_alone(count, NGRAMS),
        "suffix": lookup_alone(count, suffix, gamma=16),
        "hybrid": lookup_else(middle, NGRAMS.model_copy(update={"min_match": 3})),
    }
    return [(name, config) for name, config in starts.items() if name in space.drafters]
