"""What the rivals share: lists of configs, measuring again, random points, and the throughput of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from optuna.trial import FrozenTrial

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask
from search.cost_model import CostModel
from search.leaderboard import Entry, is_full, key_of, make_standings
from search.predictor import LayerStates
from search.proposals import Proposal, measured_keys, propose_again
from search.space import (
    DRAFT_THRESHOLD,
    GAMMA,
    SHARE_PREFIX,
    TARGET_THRESHOLD,
    THRESHOLD_MAX,
    THRESHOLD_STEP,
    SearchSpace,
)
from search.space import snap_threshold as snap

Params = dict[str, Any]
T = TypeVar("T")


class Hints(Protocol):
    """What a rival may ask of the model without a measurement; nothing is worked out before it is asked for."""

    @property
    def cost(self) -> CostModel:
        """Seconds of verifications and of the sublayers of a draft step."""

    @property
    def states(self) -> LayerStates | None:
        """None where the engine gives no access layer by layer."""

    def agreement(self, mask: SkipMask) -> float:
        """Share of positions of the tuning texts where the draft's choice is the target's token."""

    def once(self, name: str, work: Callable[[], T]) -> T:
        """What `work` gives: for a plan in which no seed plays a part. It must not ask for other hints."""


class Listed(ABC):
    """A proposer that goes through its configs in order, each once, and then measures a leader again."""

    def __init__(self, origin: str, space: SearchSpace) -> None:
        self._origin = origin
        self._space = space

    @abstractmethod
    def configs(self) -> Iterable[DecodeConfig]:
        """All that is worth measuring, first things first; made once, from the constructor's arguments alone."""

    @cached_property
    def _listed(self) -> tuple[Params, ...]:
        listed = (self._space.to_params(config) for config in self.configs())
        return tuple({key_of(params): params for params in listed}.values())

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """The first config of the list that no trial has tried."""
        done = measured_keys(trials)
        for params in self._listed:
            if key_of(params) not in done:
                return Proposal(self._origin, dict(params))
        return measure_again(trials, self._space, rng)


def standings(trials: Sequence[FrozenTrial], space: SearchSpace) -> tuple[Entry, ...]:
    """Configs measured in full, best pooled lower bound first."""
    num_first = max((len(trial.user_attrs["ratios"]) for trial in trials if is_full(trial)), default=0)
    return make_standings(trials, space, 0.0, num_first).entries


def measure_again(trials: Sequence[FrozenTrial], space: SearchSpace, rng: np.random.Generator) -> Proposal:
    """As every fourth trial of a study: the leader with the fewest trials. A random config while there is no leader."""
    entries = standings(trials, space)
    if not entries:
        return Proposal("random", random_params(space, rng))
    return propose_again(entries)


def random_params(space: SearchSpace, rng: np.random.Generator) -> Params:
    """A point of the space, every parameter uniform and on its own."""
    params: Params = {name: bool(rng.integers(2)) for name in space.bit_names}
    params[GAMMA] = int(rng.integers(1, space.gamma_max + 1))
    for name in (DRAFT_THRESHOLD, TARGET_THRESHOLD):
        params[name] = snap(THRESHOLD_STEP * int(rng.integers(round(THRESHOLD_MAX / THRESHOLD_STEP) + 1)))
    params |= {SHARE_PREFIX: bool(rng.integers(2))} if space.share_prefix else {}
    return params


def bits_of(space: SearchSpace) -> tuple[tuple[str, SkipMask], ...]:
    """Every bit of the space in the order in which the model runs its sublayers, with the mask of that bit alone."""
    count = space.num_layers
    single = [(i, 0, SkipMask.from_sublayers(count, attention=[i])) for i in space.attention_bits]
    single += [(i, 1, SkipMask.from_sublayers(count, mlp=[i])) for i in space.mlp_bits]
    single += [(i, 0, SkipMask.from_layers(count, [i])) for i in space.layer_bits]
    names = zip(space.bit_names, single, strict=True)
    return tuple((name, mask) for name, (_, _, mask) in sorted(names, key=lambda one: one[1][:2]))


def union(num_layers: int, masks: Iterable[SkipMask]) -> SkipMask:
    """Skips whatever one of the masks skips."""
    attention: set[int] = set()
    mlp: set[int] = set()
    for mask in masks:
        attention |= {i for i, skipped in enumerate(mask.attention) if skipped}
        mlp |= {i for i, skipped in enumerate(mask.mlp) if skipped}
    return SkipMask.from_sublayers(num_layers, attention=attention, mlp=mlp)


def saved_seconds(mask: SkipMask, cost: CostModel) -> float:
    """Seconds of a draft step that the mask saves."""
    return cost.draft_s(SkipMask.none(mask.num_layers), threshold=False) - cost.draft_s(mask, threshold=False)


def throughput(agreement: float, draft_s: float, gamma: int, verify_s: float) -> float:
    """Expected tokens/s of rounds of exactly `gamma` draft tokens, each accepted with the same probability.

    Ref: Leviathan et al. 2023, theorem 3.8; KnapSpec's tokens per time.
    """
    return sum(agreement**i for i in range(gamma + 1)) / (gamma * draft_s + verify_s)


def by_throughput(
    agreements: Mapping[SkipMask, float], cost: CostModel, gamma_max: int, draft_threshold: float
) -> list[DecodeConfig]:
    """Every mask at its best gamma, best estimate first; then every mask at its other gammas, likewise."""
    ranked: list[tuple[bool, float, int, SkipMask]] = []
    for mask, agreement in agreements.items():
        draft_s = cost.draft_s(mask, threshold=draft_threshold > 0)
        gammas = range(1, gamma_max + 1)
        estimates = [(throughput(agreement, draft_s, gamma, cost.verify_s[gamma]), gamma) for gamma in gammas]
        best = max(estimates, key=lambda one: one[0])
        ranked += [((value, gamma) != best, -value, gamma, mask) for value, gamma in estimates]
    ranked.sort(key=lambda one: one[:3])
    return [DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=draft_threshold) for *_, gamma, mask in ranked]
