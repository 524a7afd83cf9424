"""Who proposes the next config: warm starts, re-measurements, local moves and Optuna's samplers as one sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from search.leaderboard import Entry, counted, make_standings, was_interrupted
from search.space import DRAFT_THRESHOLD, GAMMA, TARGET_THRESHOLD, THRESHOLD_MAX, SearchSpace, snap_threshold
from search.spec import SamplerName
from search.warm_starts import warm_starts

_NUM_PARENTS = 4
_NUM_REPEAT = 4
_LOCAL_SHARE = 0.7
"""Of the trials that are neither warm starts nor repeats; Optuna's sampler draws the rest."""
_FLIP_SHARE = 0.7
"""Of those, while the leader has neighbours left that nobody has measured."""


@dataclass(frozen=True)
class SamplerOptions:
    """How to propose."""

    name: SamplerName
    seed: int
    repeat_every: int
    noise_sigma: float
    num_first: int
    """Prompts of a first trial."""


@dataclass(frozen=True)
class Proposal:
    """Where a trial's config comes from; `params` is None where an Optuna sampler draws it."""

    origin: str
    params: dict[str, Any] | None = None
    repeat_of: int | None = None


class StudySampler(BaseSampler):
    """Warm starts first, then every `repeat_every`-th trial measures a leading config again, the rest are proposals.

    Everything follows from (seed, trials counted so far, other trials running): the study goes on after a stop as if
    it had never stopped, and an interrupted trial is proposed again. Nothing uses Optuna's queue of waiting trials,
    so no process can claim a trial twice. `local-tpe` mixes single-bit flips of the leader, local moves around
    the leaders and univariate TPE.
    """

    def __init__(self, space: SearchSpace, options: SamplerOptions) -> None:
        self._space = space
        self._options = options
        self._warm = warm_starts(space)
        self._latest: tuple[int, Proposal] | None = None
        self._inner: BaseSampler = RandomSampler(seed=options.seed)

    def proposal_of(self, trial_number: int) -> Proposal:
        """Where the trial being run comes from. `queue` if it was put into Optuna's queue by hand."""
        if self._latest is not None and self._latest[0] == trial_number:
            return self._latest[1]
        return Proposal("queue")

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """The whole, fixed space."""
        return {name: one for name, one in self._space.distributions.items() if not one.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal's parameters, or what the Optuna sampler draws jointly (nothing if it draws one by one)."""
        trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        running = sum(one.state == TrialState.RUNNING for one in trials)
        index = counted(trials)
        rng = np.random.default_rng([self._options.seed, index, running])
        proposal = self._propose(trials, index, rng)
        self._latest = (trial.number, proposal)
        self._inner = self._make_inner(int(rng.integers(2**32)))
        if proposal.params is not None:
            return proposal.params
        return self._inner.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What the Optuna sampler draws for one parameter."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def _propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:
        if index < len(self._warm):
            return Proposal(f"warm:{self._warm[index].origin}", dict(self._warm[index].params))
        options = self._options
        entries = make_standings(trials, self._space, options.noise_sigma, options.num_first).entries
        every = options.repeat_every
        if every and index % every == every - 1 and entries:
            again = least_measured(entries)
            return Proposal("repeat", dict(again.params), again.trials[0])
        if options.name == "local-tpe" and entries and rng.random() < _LOCAL_SHARE:
            flips = unmeasured_flips(entries[0].params, trials, self._space)
            if flips and rng.random() < _FLIP_SHARE:
                return Proposal("flip", flips[int(rng.integers(len(flips)))])
            best_first = sorted(entries, key=lambda entry: -entry.speedup)[:_NUM_PARENTS]
            parent = best_first[int(rng.integers(len(best_first)))]
            return Proposal("local", local_move(parent.params, self._space, rng))
        return Proposal("tpe" if options.name == "local-tpe" else options.name)

    def _make_inner(self, seed: int) -> BaseSampler:
        """A fresh sampler for each trial: its state is its seed and the storage, so a resume cannot differ."""
        if self._options.name == "random":
            return RandomSampler(seed=seed)
        multivariate = self._options.name == "tpe"
        # Ten startup trials are the warm starts; one trial runs at a time, so there are no running ones to avoid.
        return TPESampler(seed=seed, multivariate=multivariate, constant_liar=False)


def least_measured(entries: Sequence[Entry]) -> Entry:
    """Of the leaders by point estimate, the one with the fewest trials: the likeliest to be there by luck."""
    leaders = sorted(entries, key=lambda entry: -entry.speedup)[:_NUM_REPEAT]
    return min(leaders, key=lambda entry: len(entry.trials))


def unmeasured_flips(
    params: Mapping[str, Any], trials: Sequence[FrozenTrial], space: SearchSpace
) -> list[dict[str, Any]]:
    """Configs that differ from `params` in one bit of the mask and that no trial has tried.

    A mask has only 2L such neighbours, most of them hopeless and so cheap to measure; trying each of the leader's once
    finds the one sublayer too many or too few that random moves of several bits seldom isolate.
    """
    # An interrupted trial measured nothing: proposing it again is what makes a resume equal an uninterrupted run.
    tried = {tuple(sorted(trial.params.items())) for trial in trials if not was_interrupted(trial)}
    flips = [dict(params) | {name: not params[name]} for name in space.bit_names]
    return [flip for flip in flips if tuple(sorted(flip.items())) not in tried]


def local_move(params: Any, space: SearchSpace, rng: np.random.Generator) -> dict[str, Any]:
    """A neighbour: one or a few bits flipped or a skipped and a kept one swapped; gamma and thresholds now and then.

    Always differs from `params` where the space has more than one point.
    """
    moved = dict(params)
    bits = list(space.bit_names)
    if bits and rng.random() < 0.8:
        on = [name for name in bits if moved[name]]
        off = [name for name in bits if not moved[name]]
        if on and off and rng.random() < 0.3:
            chosen = [str(rng.choice(on)), str(rng.choice(off))]
        else:
            count = min(len(bits), 1 + int(rng.poisson(0.7)))
            chosen = [str(name) for name in rng.choice(bits, size=count, replace=False)]
        for name in chosen:
            moved[name] = not moved[name]
    if rng.random() < 0.3:
        moved[GAMMA] = int(np.clip(moved[GAMMA] + rng.choice([-2, -1, 1, 2]), 1, space.gamma_max))
    for name, chance in ((DRAFT_THRESHOLD, 0.3), (TARGET_THRESHOLD, 0.1)):
        if rng.random() < chance:
            moved[name] = snap_threshold(float(np.clip(moved[name] + rng.normal(0, 0.15), 0, THRESHOLD_MAX)))
    if moved == dict(params):
        name = str(rng.choice(bits)) if bits else DRAFT_THRESHOLD
        moved[name] = not moved[name] if bits else snap_threshold(0.5 if moved[name] != 0.5 else 0.0)
    return moved


def quiet_optuna() -> None:
    """Optuna prints a line per trial and warns of experimental parts that this package uses knowingly."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
