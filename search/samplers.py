"""Samplers: who proposes the next config, as the Optuna sampler that a study takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from search.leaderboard import counted
from search.local_proposer import LocalProposer
from search.proposals import Proposal, ProposeOptions, Proposer
from search.space import SearchSpace
from search.spec import SamplerName

if TYPE_CHECKING:
    from search.outlook import Outlook


class ProposalSampler(BaseSampler):
    """Asks a proposer, and an Optuna sampler where the proposal leaves the parameters to it.

    Everything follows from (seed, trials counted so far, other trials running): the study goes on after a stop as if
    it had never stopped, and an interrupted trial is proposed again. Nothing uses Optuna's queue of waiting trials,
    so no process can claim a trial twice.
    """

    def __init__(self, space: SearchSpace, proposer: Proposer, seed: int, *, drawn_by: SamplerName = "tpe") -> None:
        self._space, self._proposer = space, proposer
        self._seed, self._drawn_by = seed, drawn_by
        self._latest: tuple[int, Proposal] | None = None
        self._inner: BaseSampler = RandomSampler(seed=seed)
        self.proposing_s = 0.0
        """Seconds that the latest proposal took."""

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
        start = time.perf_counter()
        trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        running = sum(one.state == TrialState.RUNNING for one in trials)
        index = counted(trials)
        rng = np.random.default_rng([self._seed, index, running])
        proposal = self._proposer.propose(trials, index, rng)
        self._latest = (trial.number, proposal)
        self._inner = self._make_inner(int(rng.integers(2**32)))
        params = proposal.params
        if params is None:
            params = self._inner.sample_relative(study, trial, search_space)
        self.proposing_s = time.perf_counter() - start
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What the Optuna sampler draws for one parameter."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def _make_inner(self, seed: int) -> BaseSampler:
        """A fresh sampler for each trial: its state is its seed and the storage, so a resume cannot differ."""
        if self._drawn_by == "random":
            return RandomSampler(seed=seed)
        if self._drawn_by == "gp":
            return GPSampler(seed=seed, deterministic_objective=False)
        # Ten startup trials are the warm starts; one trial runs at a time, so there are no running ones to avoid.
        return TPESampler(seed=seed, multivariate=self._drawn_by == "tpe", constant_liar=False)


def make_sampler(
    name: SamplerName, space: SearchSpace, seed: int, options: ProposeOptions, outlook: Outlook | None
) -> ProposalSampler:
    """The sampler of this name. `replay` needs an outlook, the others ignore it.

    `replay` ranks configs by prediction; `local-tpe` mixes single flips of the leader, local moves and univariate TPE;
    `tpe`, `gp` and `random` are Optuna's, after the same warm starts and with the same repeats.
    """
    if name == "replay":
        if outlook is None:
            raise ValueError("sampler: replay needs predictions, and there is no outlook")
        return ProposalSampler(space, outlook.proposer(options), seed)
    share = {"local_share": 0.0} if name != "local-tpe" else {}
    return ProposalSampler(space, LocalProposer(space, options, drawn_by=name, **share), seed, drawn_by=name)


def quiet_optuna() -> None:
    """Optuna prints a line per trial and warns of experimental parts that this package uses knowingly."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
