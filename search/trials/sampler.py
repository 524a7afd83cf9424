"""Samplers: who proposes the next config, as the Optuna sampler that a study takes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from search.outlook.outlook import Outlook
from search.study.attributes import CONSIDERED, ORIGIN, REPEAT_OF
from search.study.space import DRAFTER, LOOKUP_METHOD, SearchSpace
from search.study.spec import SamplerName
from search.study.trials import counted, key_of
from search.trials.proposals import Proposal, ProposeOptions, Proposer, WarmProposer
from search.trials.replay_proposer import ReplayProposer
from search.workers.claims import Claims, fixed_params, open_trials, taken_keys, with_claims

_MAX_ATTEMPTS = 16
"""At proposing what nobody measures at the moment, which a space of few points may not have."""


class ProposalSampler(BaseSampler):
    """Asks a proposer, and an Optuna sampler where the proposal leaves the parameters to it.

    Everything follows from (seed, trials that count or will, the trials themselves): the study goes on after a stop as
    if it had never stopped. With `claims` several workers propose for one study, in the order of their trials' numbers:
    each place is filled once, no seed is used twice, and what one measures no other proposes.
    """

    def __init__(
        self,
        space: SearchSpace,
        proposer: Proposer,
        seed: int,
        *,
        drawn_by: SamplerName = "tpe",
        claims: Claims | None = None,
    ) -> None:
        self._space, self._proposer = space, proposer
        self._seed, self._drawn_by, self._claims = seed, drawn_by, claims
        self._latest: tuple[int, Proposal] | None = None
        self._inner: BaseSampler = RandomSampler(seed=seed)
        self.proposing_s = 0.0
        """Seconds that the latest proposal took, waiting for other workers' included."""
        self.is_surplus = False
        """The latest trial is one too many: others have begun the last ones meanwhile."""

    def proposal_of(self, trial_number: int) -> Proposal:
        """Where the trial being run comes from. `queue` if it was put into Optuna's queue by hand."""
        if self._latest is not None and self._latest[0] == trial_number:
            return self._latest[1]
        return Proposal("queue")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Tell other workers whose trial this is; and what it measures, if that is fixed: then nothing is proposed."""
        fixed = fixed_params(trial)
        if is_all_fixed := self._space.holds(fixed):
            attrs = trial.user_attrs
            inherited = (attrs.get(REPEAT_OF), attrs.get(CONSIDERED))
            self._latest = (trial.number, Proposal(attrs.get(ORIGIN, "queue"), fixed, *inherited))
            self.proposing_s = 0.0
        if self._claims is not None:
            self._claims.begin(trial.number)
            self.is_surplus = self._claims.is_surplus(study.get_trials(deepcopy=False), trial.number)
            if is_all_fixed and not self.is_surplus:
                self._claims.claim(trial.number, fixed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """Every parameter that a trial may have."""
        return {name: one for name, one in self._space.distributions.items() if not one.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal's parameters, or what the Optuna sampler draws. Optuna asks at the first `suggest`."""
        start = time.perf_counter()
        trials = self._other_trials(study, trial)
        taken, seen = taken_keys(trials), with_claims(trials)
        index = counted(seen) + len(open_trials(seen))
        for attempt in range(_MAX_ATTEMPTS):
            rng = np.random.default_rng([self._seed, index, attempt])
            proposal = self._proposer.propose(seen, index, rng)
            given = proposal.params
            params = given if given is not None else self._space.reduce(self._draw(study, trial, search_space, rng))
            if not taken or key_of(params) not in taken:
                break
        self._latest = (trial.number, proposal)
        if self._claims is not None:
            self._claims.claim(trial.number, params | fixed_params(trial))
        self.proposing_s = time.perf_counter() - start
        return params

    def _other_trials(self, study: Study, trial: FrozenTrial) -> list[FrozenTrial]:
        if self._claims is not None:
            return self._claims.wait_for_turn(study, trial.number)
        return [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]

    def _draw(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution], rng: np.random.Generator
    ) -> dict[str, Any]:
        """All parameters from the Optuna sampler: the way to draft, then what that has, jointly where other trials let
        it be, then the others one by one. Optuna's samplers cannot draw jointly what only some trials have."""
        self._inner = self._make_inner(int(rng.integers(2**32)))
        distributions = self._space.distributions
        params = {
            name: self._inner.sample_independent(study, trial, name, distributions[name])
            for name in (DRAFTER, LOOKUP_METHOD)
            if name in distributions
        }
        names = self._space.names_for(params.get(DRAFTER, self._space.drafters[0]), params.get(LOOKUP_METHOD))
        within = {name: search_space[name] for name in names if name in search_space and name not in params}
        if self._drawn_by == "gp":  # it would look for each in every trial
            every = self._inner.infer_relative_search_space(study, trial)
            within = {name: one for name, one in within.items() if name in every}
        params |= self._inner.sample_relative(study, trial, within)
        for name, one in distributions.items():
            if name not in params:
                params[name] = self._inner.sample_independent(study, trial, name, one)
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
        # Ten startup trials are the warm starts. What others measure is claimed, so there is nothing to keep away from.
        return TPESampler(seed=seed, multivariate=True, constant_liar=False)


def make_sampler(
    name: SamplerName,
    space: SearchSpace,
    options: ProposeOptions,
    outlook: Outlook | None,
    claims: Claims | None = None,
) -> ProposalSampler:
    """The sampler of this name. `replay` needs an outlook, the others ignore it.

    `replay` ranks configs by prediction; `tpe`, `gp` and `random` are Optuna's, after warm starts and with repeats.
    """
    if name == "replay":
        if outlook is None:
            raise ValueError("sampler: replay needs predictions, and there is no outlook")
        return ProposalSampler(space, ReplayProposer.of(outlook, options), options.seed, claims=claims)
    proposer = WarmProposer(space, options, drawn_by=name)
    return ProposalSampler(space, proposer, options.seed, drawn_by=name, claims=claims)
