"""Rivals that measure masks in the order of the tokens/s expected of them: DEL's exits, leave-one-out agreements."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.predict.costs import CostModel
from search.rivals.common import Departure, Listed, Setup, bits_of, union


class ByThroughput(Listed):
    """Every mask at its best gamma, best estimate first; then every mask at its other gammas, likewise."""

    @abstractmethod
    def agreements(self) -> Mapping[SkipMask, float]:
        """The masks that are worth measuring, with the share of drafts that is expected to be right."""

    def config(self, mask: SkipMask, gamma: int) -> DecodeConfig:
        """At the method's thresholds: both off."""
        return DecodeConfig(skip_mask=mask, gamma=gamma)

    def configs(self) -> Iterable[DecodeConfig]:
        """All masks and gammas, in that order."""
        ranked: list[tuple[bool, float, int, DecodeConfig]] = []
        for mask, agreement in self.agreements().items():
            cost, estimates = self._setup.hints.cost, []
            for config in (self.config(mask, gamma) for gamma in range(1, self._setup.space.gamma_max + 1)):
                draft_s = cost.draft_s(mask, threshold=config.draft_threshold > 0)
                verify_s = cost.verify_s[config.gamma]
                estimates.append((throughput(agreement, draft_s, config.gamma, verify_s), config))
            best = max(value for value, _ in estimates)
            first = next(config for value, config in estimates if value == best)
            ranked += [(config is not first, -value, config.gamma, config) for value, config in estimates]
        ranked.sort(key=lambda one: one[:3])
        return [config for *_, config in ranked]


class DynamicExit(ByThroughput):
    """DEL (2504.05598): early exits, ordered by the tokens/s expected of each at every gamma.

    What every exit would have drafted (the paper's shadow tokens) gives its acceptance rate, and how sure it was there
    when it ends a draft: midway between its mean confidence where it was right and where it was wrong.
    Cost, once: a reading per exit layer.
    """

    DEPARTURES = (
        Departure("one exit and gamma for all text; the paper chooses both anew every round", "hurts it"),
        Departure("acceptance from all tuning texts at once instead of the latest rounds", "helps it"),
        Departure("tokens per second at the measured costs, where the paper counts layers", "helps it"),
        Departure(
            "when to stop drafting: one threshold an exit, by a rule of ours in the place of the paper's", "either way"
        ),
        Departure("the best estimates are measured, where the paper decodes by the first", "helps it"),
        Departure("the model is what it is; the paper's are trained to exit early", "hurts it"),
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__("del", setup)
        self._threshold: dict[SkipMask, float] = {}

    def agreements(self) -> Mapping[SkipMask, float]:
        """Of every exit that the space has."""
        space, hints = self._setup.space, self._setup.hints
        exits = [self._setup.mask(SkipMask.early_exit(space.num_layers, i)) for i in range(1, space.num_layers)]
        agreements = {mask: hints.agreement(mask) for mask in exits if mask.num_skipped}
        self._threshold = {mask: sum(hints.confidences(mask)) / 2 for mask in agreements}
        return agreements

    def config(self, mask: SkipMask, gamma: int) -> DecodeConfig:
        """At the exit's own threshold."""
        return DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=self._threshold[mask])


class LeaveOneOut(ByThroughput):
    """A mask's agreement as the product of the agreements with each of its sublayers removed alone.

    Sublayers are sorted by lost log agreement per second saved; the masks are the first 1, 2, ... of them. Both
    thresholds are off, since the product knows of none.
    Cost, once: an agreement per bit.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__("leave-one-out", setup)

    def agreements(self) -> Mapping[SkipMask, float]:
        """Of all sizes."""
        space, hints = self._setup.space, self._setup.hints
        bits = [mask for _, mask in bits_of(space)]
        loss = {bit: -math.log(max(hints.agreement(bit), 1e-6)) for bit in bits}
        bits.sort(key=lambda bit: loss[bit] / max(_saved_s(bit, hints.cost), 1e-12))
        return {
            union(space.num_layers, bits[:size]): math.exp(-sum(loss[bit] for bit in bits[:size]))
            for size in range(1, len(bits) + 1)
        }


def throughput(agreement: float, draft_s: float, gamma: int, verify_s: float) -> float:
    """Expected tokens/s of rounds of exactly `gamma` draft tokens, each accepted with the same probability.

    Ref: Leviathan et al. 2023, theorem 3.8; KnapSpec's tokens per time.
    """
    return sum(agreement**i for i in range(gamma + 1)) / (gamma * draft_s + verify_s)


def _saved_s(mask: SkipMask, cost: CostModel) -> float:
    """Seconds of a draft step that the mask saves."""
    return cost.draft_s(SkipMask.none(mask.num_layers), threshold=False) - cost.draft_s(mask, threshold=False)
