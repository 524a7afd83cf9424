"""The product rival: what each sublayer is worth alone, multiplied up."""

from __future__ import annotations

import math
from collections.abc import Iterable

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.rivals.common import Listed, Setup, bits_of, by_throughput, saved_seconds, union


class LeaveOneOut(Listed):
    """A mask's agreement as the product of the agreements with each of its sublayers removed alone.

    Sublayers are sorted by lost log agreement per second saved; the masks are the first 1, 2, ... of them. Sizes and
    gammas are measured in the order of the expected tokens/s; both thresholds off, since the product knows of none.
    Cost, once: an agreement per bit.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__("leave-one-out", setup)

    def configs(self) -> Iterable[DecodeConfig]:
        """All sizes and gammas, best estimate first."""
        space, hints = self._setup.space, self._setup.hints
        bits = [mask for _, mask in bits_of(space)]
        loss = {bit: -math.log(max(hints.agreement(bit), 1e-6)) for bit in bits}
        bits.sort(key=lambda bit: loss[bit] / max(saved_seconds(bit, hints.cost), 1e-12))
        agreements: dict[SkipMask, float] = {}
        for size in range(1, len(bits) + 1):
            agreements[union(space.num_layers, bits[:size])] = math.exp(-sum(loss[bit] for bit in bits[:size]))
        return by_throughput(
            agreements, hints.cost, space.gamma_max, lambda mask, gamma: DecodeConfig(skip_mask=mask, gamma=gamma)
        )
