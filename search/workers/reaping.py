"""Reaping: trials of dead workers are failed with the reason, and their configs queued again, at most twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from search.study.attributes import ATTEMPT, CLAIM, CONSIDERED, FAILURE, ORIGIN, REPEAT_OF, RETRY_OF
from search.study.trials import INTERRUPTED, WORKER_DIED
from search.workers.claims import claim_of
from search.workers.lease import Lease
from search.workers.roster import Roster

MAX_ATTEMPTS = 3
_INHERITED = (ORIGIN, REPEAT_OF, CONSIDERED)
"""What a queued trial takes over: who proposed its config. No numbers, no constraints: those are its own to measure."""


@dataclass(frozen=True)
class Reaped:
    """What became of a dead worker's trial."""

    number: int
    failure: str
    is_queued: bool

    def __str__(self) -> str:
        then = "queued again" if self.is_queued else "not queued again"
        return f"trial {self.number}: {self.failure}; its config is {then}"


class Reaper:
    """Clears away what dead workers of one study left. Several workers may try at once: a lease lets one of them."""

    def __init__(
        self, study: optuna.Study, storage: BaseStorage, study_id: int, roster: Roster, lease: Callable[[], Lease]
    ) -> None:
        self._study, self._storage, self._study_id = study, storage, study_id
        self._roster, self._lease = roster, lease

    def sweep(self) -> list[Reaped]:
        """Fail and queue what there is, if this process is the first to see it. Cost: a look at the open trials."""
        if not self._find():
            return []
        with self._lease().held(wait=lambda _holder: False) as is_first:
            return self._clear() if is_first else []

    def _find(self) -> tuple[list[FrozenTrial], list[FrozenTrial]] | None:
        """(Running trials of dead workers, failed ones that nobody has queued again); None if there are neither.

        The latter were failed by a worker that died before it could say why, or by Optuna's heartbeat, which studies of
        earlier versions have.
        """
        trials = self._study.get_trials(deepcopy=False)
        orphans = self._roster.orphans(trials)
        retried = {one.user_attrs.get(RETRY_OF) for one in trials}
        dropped = [
            one
            for one in trials
            if one.state == TrialState.FAIL
            and FAILURE not in one.user_attrs
            and CLAIM in one.user_attrs
            and one.number not in retried
            and attempt_of(one) < MAX_ATTEMPTS
        ]
        return (orphans, dropped) if orphans or dropped else None

    def _clear(self) -> list[Reaped]:
        found = self._find()  # again: somebody may have been here since
        if found is None:
            return []
        orphans, dropped = found
        done = [self._reap(one) for one in orphans]
        for trial in dropped:
            queue_again(self._study, trial, attempt=attempt_of(trial) + 1)
            done.append(Reaped(trial.number, WORKER_DIED, is_queued=True))
        return done

    def _reap(self, trial: FrozenTrial) -> Reaped:
        """Queue first, then fail: who dies in between leaves an orphan with a retry, which is not queued twice."""
        attempt = attempt_of(trial)
        retried = any(one.user_attrs.get(RETRY_OF) == trial.number for one in self._study.get_trials(deepcopy=False))
        again = claim_of(trial) is not None and attempt < MAX_ATTEMPTS
        failure = WORKER_DIED if attempt < MAX_ATTEMPTS else f"{WORKER_DIED}, {attempt} times with this config"
        if again and not retried:
            queue_again(self._study, trial, attempt=attempt + 1)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # its own end came meanwhile
            self._storage.set_trial_user_attr(trial_id, FAILURE, failure)  # first: finished trials take no attributes
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        return Reaped(trial.number, failure, again)


def attempt_of(trial: FrozenTrial) -> int:
    """How many times its config has been begun, this one included."""
    return int(trial.user_attrs.get(ATTEMPT, 1))


def queue_again(study: optuna.Study, trial: FrozenTrial, *, attempt: int) -> None:
    """Put a trial's config into the queue; the next worker that is free measures it from the start.

    Optuna's own clone of a dead trial keeps that one's constraints and numbers, and the retried trial cannot change
    them.
    """
    params = claim_of(trial)
    if params is not None:
        inherited = {name: trial.user_attrs[name] for name in _INHERITED if name in trial.user_attrs}
        study.enqueue_trial(params, user_attrs={RETRY_OF: trial.number, ATTEMPT: attempt} | inherited)


def interrupt(study: optuna.Study, trial: optuna.Trial) -> None:
    """Queue the config of a trial that a signal ends, and write down why it ended; no attempt is counted."""
    frozen = next(one for one in study.get_trials(deepcopy=False) if one.number == trial.number)
    queue_again(study, frozen, attempt=attempt_of(frozen))
    trial.set_user_attr(FAILURE, INTERRUPTED)
