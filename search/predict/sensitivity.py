"""Sensitivity: what every sublayer is worth, from readings alone: without it, and with little else but it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from layerskip.config.skip_mask import SkipMask
from search.progress import Tell, nobody
from search.study.space import SearchSpace, kind_of, layer_of
from search.study.stored import Stored


@dataclass(frozen=True)
class SublayerWorth:
    """One bit of the mask."""

    name: str
    """The bit's parameter name, `skip.attn.07`."""
    leave_one_out: float
    """Agreement of the draft with the target when this alone is skipped; 1 = nobody would notice."""
    keep_one_out: float
    """Agreement gained when this alone is added to the draft that keeps the `kept` ones; 0 = no help."""


@dataclass(frozen=True)
class Sensitivity(Stored):
    """All bits, in the space's order."""

    sublayers: tuple[SublayerWorth, ...]
    base: str
    """The mask that `keep_one_out` adds to, in text form."""
    base_agreement: float

    def order(self) -> list[str]:
        """Bit names, the most dispensable first."""
        return [one.name for one in sorted(self.sublayers, key=lambda one: (-one.leave_one_out, one.keep_one_out))]


def measure_sensitivity(
    agreement: Callable[[SkipMask], float],
    space: SearchSpace,
    tell: Tell = nobody,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sensitivity:
    """Leave each sublayer out of the whole model, and add each to a thin draft: first quarter of the layers.

    A sublayer alone, with nothing before it, says nothing that the head can read; so the thin draft, not the empty one,
    is what single sublayers are added to. Those it has are taken out of it instead.
    Sublayers come in an order that spreads over the depth; those for which the seconds do not suffice are taken to be
    worth what the nearest of their kind are. Cost: two readings per bit and one; at least two and one.
    """
    start = clock()
    count = space.num_layers
    base = SkipMask.early_exit(count, max(1, round(count / 4)))
    base_bits = space.to_bits(base)
    base_agreement = agreement(space.to_mask(base_bits))
    worths: dict[str, SublayerWorth] = {}
    tell(0, len(space.bit_names))
    for name in _spread(space.bit_names) if seconds is not None else space.bit_names:
        if worths and seconds is not None and clock() - start > seconds:
            break
        without = {bit: bit == name for bit in space.bit_names}
        flipped = agreement(space.to_mask(base_bits | {name: not base_bits[name]}))
        gained = flipped - base_agreement if base_bits[name] else base_agreement - flipped
        worths[name] = SublayerWorth(name, agreement(space.to_mask(without)), gained)
        tell(len(worths), len(space.bit_names))
    found = [replace(worths[_nearest(name, worths)], name=name) for name in space.bit_names]
    return Sensitivity(tuple(found), str(space.to_mask(base_bits)), base_agreement)


def _spread(names: Sequence[str]) -> list[str]:
    """Every eighth layer's sublayers, then those halfway between them, and so on."""
    found: dict[str, None] = {}
    for step in (8, 4, 2, 1):
        found |= dict.fromkeys(name for name in names if layer_of(name) % step == 0)
    return list(found)


def _nearest(name: str, read: Iterable[str]) -> str:
    """The one of its own kind in the nearest layer, or of another kind where none of its own was read."""
    return min(read, key=lambda one: (kind_of(one) != kind_of(name), abs(layer_of(one) - layer_of(name)), one))
