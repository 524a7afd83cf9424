"""Claims: no config is measured by two workers at once, and proposals are made in the order of trial numbers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from search.study.attributes import CLAIM, PROCESS, SHARES_DEVICE, WORKER
from search.study.trials import Key, counted, key_of
from search.workers.device import share_a_device
from search.workers.heartbeats import Patience
from search.workers.process import process_token
from search.workers.roster import Roster

_QUEUED = "fixed_params"
"""Where Optuna keeps the parameters of a queued trial."""


def claim_of(trial: FrozenTrial) -> dict[str, Any] | None:
    """The parameters that an open trial has or will have, all of them; None while nobody knows."""
    claim = trial.user_attrs.get(CLAIM, fixed_params(trial))
    return dict(claim) if claim else None


def fixed_params(trial: FrozenTrial) -> dict[str, Any]:
    """Parameters of a trial out of Optuna's queue, which were fixed when it was queued; empty for any other."""
    return dict(trial.system_attrs.get(_QUEUED, {}))


def open_trials(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those being measured or queued."""
    return [one for one in trials if one.state in (TrialState.RUNNING, TrialState.WAITING)]


def taken_keys(trials: Sequence[FrozenTrial]) -> set[Key]:
    """Configs that some worker measures now or will, because they are queued."""
    claims = [claim_of(trial) for trial in open_trials(trials)]
    return {key_of(claim) for claim in claims if claim is not None}


def with_claims(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The same trials, those not finished with the parameters they have claimed; without those that have none."""
    seen = []
    for trial in trials:
        if trial.state.is_finished():
            seen.append(trial)
        elif (claim := claim_of(trial)) is not None:
            claimed = copy.copy(trial)
            claimed.params = claim
            seen.append(claimed)
    return seen


class Claims:
    """What the sampler of one worker tells the others, and learns of them.

    A worker that proposes first waits until every running trial with a lower number has claimed its config. Numbers are
    given out one by one, so no two workers can propose without one of them knowing the other's choice.
    """

    def __init__(self, storage: BaseStorage, study_id: int, roster: Roster, patience: Patience) -> None:
        self._storage, self._study_id = storage, study_id
        self._roster, self._patience = roster, patience
        self.total: int | None = None
        """Trials that the study shall have."""
        self.is_stopped: Callable[[], bool] = lambda: False
        """Whether a signal has come: then nothing is waited for, because the trial will not be measured."""

    def begin(self, trial_number: int) -> None:
        """Say whose trial this is."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial_number)
        self._roster.current = trial_number
        self._storage.set_trial_user_attr(trial_id, PROCESS, process_token())
        self._storage.set_trial_user_attr(trial_id, WORKER, self._roster.number)
        near = [one.number for one in self._roster.others() if share_a_device(self._roster.facts, one)]
        if near:
            self._storage.set_trial_user_attr(trial_id, SHARES_DEVICE, near)

    def claim(self, trial_number: int, params: dict[str, Any]) -> None:
        """Say what this trial will measure."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial_number)
        self._storage.set_trial_user_attr(trial_id, CLAIM, params)

    def wait_for_turn(self, study: optuna.Study, trial_number: int) -> list[FrozenTrial]:
        """The other trials, once all running ones with lower numbers have claimed their configs or died."""
        pause = 0.01
        while True:
            trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial_number]
            before = [
                one
                for one in trials
                if one.state == TrialState.RUNNING and one.number < trial_number and claim_of(one) is None
            ]
            if not before or self.is_stopped() or len(self._roster.orphans(before)) == len(before):
                return trials
            time.sleep(pause)
            pause = min(2 * pause, self._patience.poll_s)

    def is_surplus(self, trials: Sequence[FrozenTrial], trial_number: int) -> bool:
        """Whether the total is reached without this trial: others with lower numbers are at it."""
        if self.total is None:
            return False
        ahead = sum(one.state == TrialState.RUNNING and one.number < trial_number for one in trials)
        return counted(trials) + ahead >= self.total
