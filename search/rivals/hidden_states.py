"""Rivals that keep the draft's hidden states near the target's, by dynamic programming: CLaSp and KnapSpec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from optuna.trial import FrozenTrial

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.predict.costs import CostModel
from search.predict.predictor import LayerStates
from search.rivals.by_throughput import ByThroughput
from search.rivals.common import Departure, Plan, Setup, bits_of, union
from search.study.space import SearchSpace
from search.study.trials import key_of
from search.trials.proposals import Proposal, measured_keys

PLANS = "plans"
"""Under which a record keeps `plan_facts`."""
MAX_WEIGHT = 5
MIN_SIMILARITY = 0.5
_WEIGHTS = sorted({pair for k in range(1, MAX_WEIGHT + 1) for pair in ((1, k), (k, 1))})
"""(attention, MLP): all that `latency_weights` can give, whatever the costs are."""


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
    Cost, once: about L^2 / 2 layers on all positions.
    """

    DRAFT_THRESHOLD = 0.7
    FIRST_GAMMA = 10
    DEPARTURES = (
        Departure("one mask for all text; the paper plans anew from the last token every few rounds", "hurts it"),
        Departure("planning takes no time while decoding", "helps it"),
        Departure("cosine averaged over all tuning texts instead of taken at one token", "helps it"),
        Departure("the number of skipped layers and gamma are swept by measurement instead of set by hand", "helps it"),
    )

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """The next untried point of the sweep."""
        done = measured_keys(trials)
        for count, gamma in self._sweep(trials):
            mask = self._plan[count]
            config = DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=self.DRAFT_THRESHOLD)
            params = self._setup.params(config)
            if key_of(params) not in done:
                return Proposal("clasp", params)
        return self._setup.measure_again(trials, rng)

    @cached_property
    def _plan(self) -> Plan:
        return self._setup.hints.layer_plan()

    def _sweep(self, trials: Sequence[FrozenTrial]) -> Iterator[tuple[int, int]]:
        """Numbers of skipped layers (at least 1, never all) with gammas."""
        num_layers, gamma_max = self._setup.space.num_layers, self._setup.space.gamma_max
        counts = [count for count in sorted(self._plan) if 0 < count < num_layers]
        first = min(self.FIRST_GAMMA, gamma_max)
        for eighths in (4, 5, 3, 6, 2, 7, 1):
            if round(num_layers * eighths / 8) in counts:
                yield round(num_layers * eighths / 8), first
        leaders = self._setup.standings(trials)
        best = (len(leaders[0].config.skip_mask.skipped_layers), leaders[0].config.gamma) if leaders else (0, first)
        grid = [(count, gamma) for count in counts for gamma in range(1, gamma_max + 1)]
        yield from sorted(grid, key=lambda one: (one[0] != best[0] and one[1] != best[1], _steps_between(one, best)))


class KnapSpec(ByThroughput):
    """KnapSpec (2602.20217): attention and MLP apart, a knapsack of seconds saved with cosine as the value.

    Latencies are whole multiples, 1 to 5, of the cheaper kind of sublayer; per number of multiples saved, dynamic
    programming keeps the state nearest to the target's; branches below a cosine of 0.5 die; the first and the last
    layer stay. Of the surviving masks, agreement and latencies give the expected tokens/s per gamma, which orders them.
    Draft threshold 0.7, as in the authors' program.
    Cost, once: up to a sublayer per bit and budget on all positions, and an agreement per budget.
    """

    DRAFT_THRESHOLD = 0.7
    DEPARTURES = (
        Departure("one mask for all text; the paper plans anew while decoding, as the context grows", "hurts it"),
        Departure("planning takes no time while decoding", "helps it"),
        Departure("cosine and agreement over all tuning texts instead of the latest tokens", "helps it"),
        Departure("all budgets, where the authors' program stops at half of what can be saved", "helps it"),
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__("knapspec", setup)

    def agreements(self) -> Mapping[SkipMask, float]:
        """Of all surviving masks; of the whole model as its own draft if none survived."""
        hints = self._setup.hints
        plan = hints.sublayer_plan(*latency_weights(hints.cost))
        masks = [mask for mask in plan.values() if mask.num_skipped]
        return {mask: hints.agreement(mask) for mask in masks} or {SkipMask.none(self._setup.space.num_layers): 1.0}

    def config(self, mask: SkipMask, gamma: int) -> DecodeConfig:
        """At the authors' threshold."""
        return DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=self.DRAFT_THRESHOLD)


def layer_plan(states: LayerStates, space: SearchSpace) -> Plan:
    """Per number of skipped whole layers the mask that CLaSp's dynamic programming finds, of the space's layers."""
    count = space.num_layers
    apart = set(space.attention_bits) & set(space.mlp_bits)
    bits = [SkipMask.from_layers(count, [i]) for i in sorted(apart | set(space.layer_bits))]
    return most_similar(states, bits, [1] * len(bits), -1.0)


def sublayer_plan(states: LayerStates, space: SearchSpace, attention: int, mlp: int) -> Plan:
    """Per weight saved the mask that KnapSpec's dynamic programming finds, at these weights of a sublayer; dead ones
    are left out. Weight 0 skips nothing."""
    bits = [bit for _, bit in bits_of(space)]
    inner = [bit for bit in bits if not any(bit.attention[i] or bit.mlp[i] for i in (0, space.num_layers - 1))]
    weights = [attention * any(bit.attention) + mlp * any(bit.mlp) for bit in inner]
    return most_similar(states, inner, weights, MIN_SIMILARITY)


def most_similar(states: LayerStates, bits: Sequence[SkipMask], weights: Sequence[int], min_similarity: float) -> Plan:
    """Per weight saved, the union of `bits` that keeps the draft's state nearest to the target's, bit by bit.

    The best state after a bit with so much saved comes from the best ones before it, by cosine with the target's state
    there: exact where the nearer state stays the nearer one. Each bit is one sublayer or one whole layer; what no bit
    stands for is always run. Entries below `min_similarity` die.
    """
    owner = {(i, 0): place for place, bit in enumerate(bits) for i, skips in enumerate(bit.attention) if skips}
    owner |= {(i, 1): place for place, bit in enumerate(bits) for i, skips in enumerate(bit.mlp) if skips}
    table = {0: _Best(1.0, states.embed(), ())}
    for layer in range(states.num_layers):
        halves = [owner.get((layer, kind)) for kind in (0, 1)]
        for place, kinds in [(halves[0], (0, 1))] if halves[0] == halves[1] else zip(halves, ((0,), (1,)), strict=True):
            target = states.target(layer + 1) if 1 in kinds else states.attention(layer, states.target(layer))
            kept = {saved: (_run(states, layer, kinds, one.hidden), one.skipped) for saved, one in table.items()}
            skipped = {}
            if place is not None:
                skipped = {saved + weights[place]: (one.hidden, (*one.skipped, place)) for saved, one in table.items()}
            table = _nearer(target, kept, skipped, min_similarity)
    return {
        saved: union(states.num_layers, [bits[place] for place in one.skipped]) for saved, one in sorted(table.items())
    }


def latency_weights(cost: CostModel) -> tuple[int, int]:
    """Seconds of an attention and an MLP sublayer as whole multiples, 1 to 5, of the cheaper kind."""
    attention_s, mlp_s = float(np.mean(cost.attention_s)), float(np.mean(cost.mlp_s))
    unit = max(min(attention_s, mlp_s), 1e-12)
    attention, mlp = (min(max(round(seconds / unit), 1), MAX_WEIGHT) for seconds in (attention_s, mlp_s))
    return attention, mlp


def plan_facts(states: LayerStates, space: SearchSpace) -> dict[str, Any]:
    """Every plan that CLaSp and KnapSpec can make of these states, whatever steps cost, as JSON; see `StoredPlans`.

    Cost: ten dynamic programmings.
    """
    facts = {"layers": _to_json(layer_plan(states, space))}
    return facts | {f"{a},{m}": _to_json(sublayer_plan(states, space, a, m)) for a, m in _WEIGHTS}


@dataclass(frozen=True)
class StoredPlans:
    """Plans from `plan_facts`, where the model is not at hand: part of `Hints`."""

    facts: Mapping[str, Any] | None

    def layer_plan(self) -> Plan:
        """See `layer_plan`. Raises: ValueError where no plans were stored."""
        return self._plan("layers")

    def sublayer_plan(self, attention: int, mlp: int) -> Plan:
        """See `sublayer_plan`. Raises: as `layer_plan`."""
        return self._plan(f"{attention},{mlp}")

    def _plan(self, name: str) -> Plan:
        if self.facts is None or name not in self.facts:
            raise ValueError(f"plans: must hold {name!r}, computed from hidden states, got {sorted(self.facts or ())}")
        return {int(saved): SkipMask.parse(mask) for saved, mask in self.facts[name].items()}


def _to_json(plan: Plan) -> dict[str, str]:
    return {str(saved): str(mask) for saved, mask in plan.items()}


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


def _run(states: LayerStates, layer: int, kinds: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
    """Through the attention (0), the MLP (1) or both."""
    if 0 in kinds:
        hidden = states.attention(layer, hidden)
    return states.mlp(layer, hidden) if 1 in kinds else hidden


def _cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean over the rows. Cost: one device sync."""
    return float(torch.nn.functional.cosine_similarity(left.float(), right.float(), dim=-1).mean())


def _steps_between(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
