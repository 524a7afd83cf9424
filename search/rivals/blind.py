"""Rivals that know nothing of the model but its number of layers: random, raw-bit TPE, the early-exit grid."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from search.rivals.common import Departure, Listed, Setup
from search.study.space import random_params
from search.trials.proposals import Proposal


class RandomSearch:
    """Every bit, gamma and both thresholds drawn uniformly, each on its own."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """A random point of the space."""
        space = self._setup.space
        return Proposal("random", self._setup.params(space.to_config(random_params(space, rng))))


class RawTpe:
    """Optuna's TPE (multivariate, as it comes) on the raw bits, gamma and thresholds, without a warm start.

    Where settings are predicted it has the bits alone.
    Cost: the trials so far go into a fresh in-memory study each time, so that nothing but the arguments matters.
    Ref: Bergstra et al. 2011; the first search of this kind, and the seed of this project.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """What TPE draws; its first ten trials are random."""
        space = self._setup.space
        names = space.bit_names if self._setup.with_settings else tuple(space.distributions)
        sampler = TPESampler(seed=int(rng.integers(2**32)), constant_liar=False)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_reduced(trial, names) for trial in trials if trial.state.is_finished()])
        drawn = study.ask({name: space.distributions[name] for name in names}).params
        rest = space.to_params(DecodeConfig(skip_mask=SkipMask.none(space.num_layers), gamma=1))
        return Proposal("tpe", self._setup.params(space.to_config(rest | drawn)))  # thresholds without binary dust


class EarlyExitGrid(Listed):
    """LayerSkip (2404.16710): all exit layers times all gammas, both thresholds off, in random order."""

    DEPARTURES = (
        Departure("the model is what it is; the paper trains its models to exit early", "hurts it"),
        Departure("verification runs the exit's layers again", "hurts it"),
        Departure("exit and gamma are tuned on the prompts at hand instead of set by hand", "helps it"),
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__("early-exit", setup)

    def configs(self) -> Iterable[DecodeConfig]:
        """The shuffled grid."""
        space = self._setup.space
        count = space.num_layers
        grid = [(exit_layer, gamma) for exit_layer in range(1, count) for gamma in range(1, space.gamma_max + 1)]
        for i in np.random.default_rng(self._setup.seed).permutation(len(grid)):
            exit_layer, gamma = grid[i]
            mask = SkipMask.early_exit(count, exit_layer)
            yield DecodeConfig(skip_mask=mask, gamma=gamma)


def _reduced(trial: FrozenTrial, names: Sequence[str]) -> FrozenTrial:
    """The trial with these parameters alone, and without attributes, which Optuna would copy."""
    found = copy.copy(trial)
    found.user_attrs = {}
    found.params = {name: trial.params[name] for name in names if name in trial.params}
    found.distributions = {name: one for name, one in trial.distributions.items() if name in found.params}
    return found
