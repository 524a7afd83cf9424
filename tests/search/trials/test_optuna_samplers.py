"""Optuna's own samplers over a space of several ways to draft: each proposes what can be built, and TPE learns."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from search.study.space import LOOKUP_GAMMA, SearchSpace
from search.trials.proposals import ProposeOptions, WarmProposer
from search.trials.sampler import ProposalSampler

SPACE = SearchSpace(4, 8, tuple(range(4)), tuple(range(4)), (), drafters=("layer_skip", "prompt_lookup", "hybrid"))


def _study_by(name: Any, num_trials: int, seed: int) -> optuna.Study:
    def speedup(trial: optuna.Trial) -> float:
        config = SPACE.suggest(trial)
        return 2.0 - abs(config.lookup_gamma - 13) / 20 if config.lookup is not None else 1.0

    proposer = WarmProposer(SPACE, ProposeOptions(0, 0.03, 4, seed), drawn_by=name)
    sampler = ProposalSampler(SPACE, proposer, seed, drawn_by=name)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(speedup, n_trials=num_trials, catch=(Exception,))
    return study


@pytest.mark.parametrize("name", ["gp", "tpe", "random"])
def test_no_proposal_fails(name: str) -> None:
    trials = _study_by(name, 28, seed=1).trials
    assert [one.state for one in trials] == [TrialState.COMPLETE] * 28
    assert len({one.params["drafter"] for one in trials}) == 3


def test_tpe_draws_more_of_what_was_fast() -> None:
    """Each lacks parameters that others have: drawn jointly all at once, no earlier trial would be of any use."""

    def share(name: str) -> float:
        gammas = [
            trial.params[LOOKUP_GAMMA]
            for seed in range(4)
            for trial in _study_by(name, 60, seed).trials[20:]
            if LOOKUP_GAMMA in trial.params
        ]
        return sum(8 <= gamma <= 18 for gamma in gammas) / len(gammas)

    assert share("tpe") > share("random") + 0.1
