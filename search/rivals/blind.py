"""Rivals that know nothing of the model but its number of layers: random, raw-bit TPE, the early-exit grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask
from search.proposals import Proposal
from search.rivals.common import Listed, random_params
from search.space import SearchSpace


class RandomSearch:
    """Every bit, gamma and both thresholds drawn uniformly, each on its own."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """A random point of the space."""
        return Proposal("random", random_params(self._space, rng))


class RawTpe:
    """Optuna's TPE (multivariate, as it comes) on the raw bits, gamma and thresholds, without a warm start.

    Cost: the trials so far go into a fresh in-memory study each time, so that nothing but the arguments matters.
    Ref: Bergstra et al. 2011; the first search of this kind, and the seed of this project.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space

    def propose(self, trials: Sequence[FrozenTrial], index: int, rng: np.random.Generator) -> Proposal:  # noqa: ARG002
        """What TPE draws; its first ten trials are random."""
        sampler = TPESampler(seed=int(rng.integers(2**32)), constant_liar=False)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([trial for trial in trials if trial.state.is_finished()])
        params = study.ask(self._space.distributions).params
        return Proposal("tpe", self._space.to_params(self._space.to_config(params)))  # thresholds without binary dust


class EarlyExitGrid(Listed):
    """LayerSkip (2404.16710): all exit layers times all gammas, both thresholds off, in random order.

    Deviation: the paper trains its models to exit early; here the stock model is what it is.
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        super().__init__("early-exit", space)
        self._seed = seed

    def configs(self) -> Iterable[DecodeConfig]:
        """The shuffled grid."""
        count = self._space.num_layers
        grid = [(exit_layer, gamma) for exit_layer in range(1, count) for gamma in range(1, self._space.gamma_max + 1)]
        for i in np.random.default_rng(self._seed).permutation(len(grid)):
            exit_layer, gamma = grid[i]
            yield DecodeConfig(skip_mask=SkipMask.early_exit(count, exit_layer), gamma=gamma)
