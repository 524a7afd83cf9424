"""What the rivals share: what they are built with, lists of configs, and measuring again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial

from layerskip.analysis.teacher_forcing import DraftReadings
from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.predict.costs import CostModel
from search.study.leaderboard import Entry, make_standings
from search.study.space import SearchSpace, random_params
from search.study.trials import key_of
from search.trials.proposals import Proposal, ProposeOptions, Proposer, measured_keys, propose_again, repeat_due

Params = dict[str, Any]
Plan = dict[int, SkipMask]
"""Of dynamic programming: by what is saved, the mask that saves it."""


class Departure(NamedTuple):
    """Where a rival here is not what its paper has."""

    what: str
    effect: Literal["helps it", "hurts it", "either way"]


class Hints(Protocol):
    """What a rival may ask of the model without a measurement; nothing is worked out before it is asked for."""

    @property
    def cost(self) -> CostModel:
        """Seconds of verifications and of the sublayers of a draft step."""

    def agreement(self, mask: SkipMask) -> float:
        """Share of positions of the tuning texts where the draft's choice is the target's token."""

    def confidences(self, mask: SkipMask) -> tuple[float, float]:
        """The draft's mean confidence where its choice is the target's token, and where it is not; 0 of no position."""

    def best_setting(self, mask: SkipMask) -> DecodeConfig:
        """This mask of the space at the best gamma and thresholds that the study's own predictor knows."""

    def layer_plan(self) -> Plan:
        """CLaSp's, see `hidden_states.layer_plan`. Raises: ValueError where there are no hidden states."""

    def sublayer_plan(self, attention: int, mlp: int) -> Plan:
        """KnapSpec's at these weights, see `hidden_states.sublayer_plan`. Raises: as `layer_plan`."""


@dataclass(frozen=True)
class Setup:
    """What a rival is built with."""

    space: SearchSpace
    hints: Hints
    seed: int
    options: ProposeOptions
    """When leaders are measured again and how configs are ranked: as for ours."""
    with_settings: bool = False
    """Whether every mask is measured at its best predicted setting instead of the method's own."""
    _best: dict[SkipMask, Params] = field(init=False, repr=False, default_factory=dict)

    def mask(self, mask: SkipMask) -> SkipMask:
        """What the space has of it."""
        return self.space.to_mask(self.space.to_bits(mask))

    def params(self, config: DecodeConfig) -> Params:
        """What to measure where the method says `config`."""
        if not self.with_settings:
            return self.space.to_params(config)
        mask = config.skip_mask
        if mask not in self._best:
            self._best[mask] = self.space.to_params(self.hints.best_setting(self.mask(mask)))
        return dict(self._best[mask])

    def standings(self, trials: Sequence[FrozenTrial]) -> tuple[Entry, ...]:
        """Configs measured in full, best pooled lower bound first."""
        return make_standings(trials, self.space, self.options.noise_sigma, self.options.num_first).entries

    def measure_again(self, trials: Sequence[FrozenTrial], rng: np.random.Generator) -> Proposal:
        """The leader with the fewest trials. A random config while there is no leader."""
        entries = self.standings(trials)
        return propose_again(entries) if entries else Proposal("random", random_params(self.space, rng))


class WithRepeats:
    """A rival that measures a leader again as often as ours does: so its leaders too are judged on many prompts."""

    def __init__(self, rival: Proposer, setup: Setup) -> None:
        self._rival, self._setup = rival, setup

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        """The rival's, but every so many-th a leader."""
        again = repeat_due(trials, index, self._setup.space, self._setup.options)
        return again or self._rival.propose(trials, index, rng)


class Listed(ABC):
    """A proposer that goes through its configs in order, each once, and then measures a leader again."""

    def __init__(self, origin: str, setup: Setup) -> None:
        self._origin, self._setup = origin, setup
        self._listed: list[Params] = []
        self._more: Iterator[DecodeConfig] | None = None

    @abstractmethod
    def configs(self) -> Iterable[DecodeConfig]:
        """All that is worth measuring, first things first; made once, from the constructor's arguments alone."""

    def _all(self) -> Iterator[Params]:
        """Each once it is asked for: a setting of its own may have to be predicted."""
        yield from self._listed
        self._more = iter(self.configs()) if self._more is None else self._more
        for config in self._more:
            self._listed.append(self._setup.params(config))
            yield self._listed[-1]

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """The first config of the list that no trial has tried."""
        done = measured_keys(trials)
        for params in self._all():
            if key_of(params) not in done:
                return Proposal(self._origin, dict(params))
        return self._setup.measure_again(trials, rng)


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


def mean_confidences(reading: DraftReadings, lengths: NDArray[Any]) -> tuple[float, float]:
    """See `Hints.confidences`; of first drafts. `lengths` (P,): tokens of each text."""
    right, sure = reading.accepted[0] > 0, reading.confidence[0]
    is_draft = np.arange(right.shape[1]) < np.asarray(lengths)[:, None] - 1
    return tuple(float(sure[one].mean()) if one.any() else 0.0 for one in (right & is_draft, ~right & is_draft))  # type: ignore[return-value]
