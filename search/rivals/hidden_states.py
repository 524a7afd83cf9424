"""Rivals that keep the draft's hidden states near the target's, by dynamic programming: CLaSp and KnapSpec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from optuna.trial import FrozenTrial

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask
from search.cost_model import CostModel
from search.leaderboard import key_of
from search.predictor import LayerStates
from search.proposals import Proposal, measured_keys
from search.rivals.common import (
    Hints,
    Listed,
    bits_of,
    by_throughput,
    measure_again,
    standings,
    union,
)
from search.space import SearchSpace


@dataclass(frozen=True)
class _Best:
    """The draft nearest to the target so far, of those that skip as much: its state and what it skips."""

    similarity: float
    hidden: torch.Tensor
    skipped: tuple[int, ...]


class Clasp:
    """CLaSp (2505.24196): per number of skipped layers the whole layers that dynamic programming finds by cosine.

    How many to skip and gamma are swept by measurement: eighths of the layers from the middle outward at gamma 10, then
    around the leader, along one axis before both. Draft threshold 0.7, where the paper's own sweep has its optimum.
    Deviations: one plan from the tuning texts, where the paper plans anew every so many rounds from the last token; the
    cosine is the mean over all positions. Cost, once: about L^2 / 2 layers on all positions.
    """

    DRAFT_THRESHOLD = 0.7
    FIRST_GAMMA = 10

    def __init__(self, space: SearchSpace, hints: Hints) -> None:
        self._space = space
        self._hints = hints

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """The next untried point of the sweep."""
        done = measured_keys(trials)
        for count, gamma in self._sweep(trials):
            mask = SkipMask.from_layers(self._space.num_layers, self._plans[count])
            config = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=self.DRAFT_THRESHOLD)
            params = self._space.to_params(config)
            if key_of(params) not in done:
                return Proposal("clasp", params)
        return measure_again(trials, self._space, rng)

    @cached_property
    def _plans(self) -> dict[int, tuple[int, ...]]:
        states = _states("clasp", self._hints)
        return self._hints.once("clasp", lambda: most_similar_layers(states))

    def _sweep(self, trials: Sequence[FrozenTrial]) -> Iterator[tuple[int, int]]:
        """Numbers of skipped layers (at least 1, never all) with gammas."""
        num_layers, gamma_max = self._space.num_layers, self._space.gamma_max
        counts = range(1, num_layers)
        first = min(self.FIRST_GAMMA, gamma_max)
        for eighths in (4, 5, 3, 6, 2, 7, 1):
            if round(num_layers * eighths / 8) in counts:
                yield round(num_layers * eighths / 8), first
        leaders = standings(trials, self._space)
        best = (len(leaders[0].config.skip_mask.skipped_layers), leaders[0].config.gamma) if leaders else (0, first)
        grid = [(count, gamma) for count in counts for gamma in range(1, gamma_max + 1)]
        yield from sorted(grid, key=lambda one: (one[0] != best[0] and one[1] != best[1], _steps_between(one, best)))


class KnapSpec(Listed):
    """KnapSpec (2602.20217): attention and MLP apart, a knapsack of seconds saved with cosine as the value.

    Latencies are whole multiples, 1 to 5, of the cheaper kind of sublayer; per number of multiples saved, dynamic
    programming keeps the state nearest to the target's; branches below a cosine of 0.5 die; the first and the last
    layer stay. Of the surviving masks, agreement and latencies give the expected tokens/s per gamma, which orders them.
    Draft threshold 0.7, as in the authors' program.
    Deviations: one plan from the tuning texts, where the paper plans anew while decoding; all budgets, where the
    authors' program stops at half of what can be saved. Cost, once: up to a sublayer per bit and budget on all
    positions, and an agreement per budget.
    """

    DRAFT_THRESHOLD = 0.7
    MAX_WEIGHT = 5
    MIN_SIMILARITY = 0.5

    def __init__(self, space: SearchSpace, hints: Hints) -> None:
        super().__init__("knapspec", space)
        self._hints = hints

    def configs(self) -> Iterable[DecodeConfig]:
        """All surviving masks and gammas, best estimate first; the whole model as its own draft if none survived."""
        states, bits = _states("knapspec", self._hints), [mask for _, mask in bits_of(self._space)]
        weights = latency_weights(bits, self._hints.cost, self.MAX_WEIGHT)
        plans = self._hints.once("knapspec", lambda: most_similar_sublayers(states, bits, weights, self.MIN_SIMILARITY))
        count = self._space.num_layers
        masks = [union(count, [bits[i] for i in skipped]) for skipped in plans.values() if skipped]
        agreements = {mask: self._hints.agreement(mask) for mask in masks} or {SkipMask.none(count): 1.0}
        return by_throughput(agreements, self._hints.cost, self._space.gamma_max, self.DRAFT_THRESHOLD)


def most_similar_layers(states: LayerStates) -> dict[int, tuple[int, ...]]:
    """Per number of skipped whole layers, 0 to L, the layers that CLaSp's dynamic programming skips.

    The draft's best state after layer i with j skipped comes from the best ones before it with j or j - 1 skipped, by
    cosine with the target's state there: exact where the nearer state stays the nearer one.
    """
    table = {0: _Best(1.0, states.embed(), ())}
    for layer in range(states.num_layers):
        target = states.target(layer + 1)
        kept = {j: (states.mlp(layer, states.attention(layer, one.hidden)), one.skipped) for j, one in table.items()}
        skipped = {j + 1: (one.hidden, (*one.skipped, layer)) for j, one in table.items()}
        table = _nearer(target, kept, skipped, -1.0)
    return {j: one.skipped for j, one in table.items()}


def most_similar_sublayers(
    states: LayerStates, bits: Sequence[SkipMask], weights: Sequence[int], min_similarity: float
) -> dict[int, tuple[int, ...]]:
    """Per weight saved, the places in `bits` that KnapSpec's dynamic programming skips; dead weights are left out.

    `bits` are in the order in which they run, each one sublayer or one whole layer; weight 0 skips nothing.
    """
    last = states.num_layers - 1
    table = {0: _Best(1.0, states.embed(), ())}
    for place, (bit, weight) in enumerate(zip(bits, weights, strict=True)):
        layer = next(i for i in range(last + 1) if bit.attention[i] or bit.mlp[i])
        target = states.target(layer + 1) if bit.mlp[layer] else states.attention(layer, states.target(layer))
        kept = {saved: (_run(states, layer, bit, one.hidden), one.skipped) for saved, one in table.items()}
        skipped = {}
        if 0 < layer < last:
            skipped = {saved + weight: (one.hidden, (*one.skipped, place)) for saved, one in table.items()}
        table = _nearer(target, kept, skipped, min_similarity)
    return {saved: one.skipped for saved, one in sorted(table.items())}


def latency_weights(bits: Sequence[SkipMask], cost: CostModel, most: int) -> list[int]:
    """Seconds of each bit as a whole multiple, 1 to `most`, of the cheaper kind of sublayer."""
    attention_s, mlp_s = float(np.mean(cost.attention_s)), float(np.mean(cost.mlp_s))
    unit = max(min(attention_s, mlp_s), 1e-12)
    attention, mlp = (min(max(round(seconds / unit), 1), most) for seconds in (attention_s, mlp_s))
    return [attention * any(bit.attention) + mlp * any(bit.mlp) for bit in bits]


def _nearer(
    target: torch.Tensor,
    kept: dict[int, tuple[torch.Tensor, tuple[int, ...]]],
    skipped: dict[int, tuple[torch.Tensor, tuple[int, ...]]],
    min_similarity: float,
) -> dict[int, _Best]:
    """Of each entry's two ways the one nearer to the target, if it is near enough; of equals the one that skips."""
    table: dict[int, _Best] = {}
    for ways in (skipped, kept):
        for saved, (hidden, layers) in ways.items():
            similarity = _cosine(hidden, target)
            if similarity >= min_similarity and (saved not in table or similarity > table[saved].similarity):
                table[saved] = _Best(similarity, hidden, layers)
    return table


def _run(states: LayerStates, layer: int, bit: SkipMask, hidden: torch.Tensor) -> torch.Tensor:
    """What the bit stands for: the attention, the MLP or both."""
    if bit.attention[layer]:
        hidden = states.attention(layer, hidden)
    return states.mlp(layer, hidden) if bit.mlp[layer] else hidden


def _cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean over the rows. Cost: one device sync."""
    return float(torch.nn.functional.cosine_similarity(left.float(), right.float(), dim=-1).mean())


def _steps_between(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _states(name: str, hints: Hints) -> LayerStates:
    states = hints.states
    if states is None:
        raise ValueError(f"strategy {name!r}: needs hidden states layer by layer, which this engine does not give")
    return states
