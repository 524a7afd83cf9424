"""Lease: one process at a time, over any Optuna storage, and no longer than its holder lives."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from search.workers.heartbeats import Beats, Patience, Witness
from search.workers.process import process_token

_TICKET, _PROCESS, _BEAT = "ticket", "process", "beat"
_Vanished = (KeyError, optuna.exceptions.UpdateFinishedTrialError, optuna.exceptions.StorageInternalError)


class Lease:
    """A queue of tickets: trials of a study that is there only while somebody holds the lease or waits for it.

    Trial numbers are given out one by one by every storage, so the tickets have an order that all processes agree on.
    The lowest ticket whose process lives holds the lease; a dead one is passed over. Who leaves with nobody behind
    takes the study along; one who queued in that very moment finds no ticket any more and queues anew.
    """

    def __init__(self, storage: BaseStorage, name: str, beats: Beats, witness: Witness, patience: Patience) -> None:
        self._storage, self._name = storage, name
        self._beats, self._witness, self._patience = beats, witness, patience
        self._ticket = ""
        self._study_id = self._trial_id = -1

    def acquire(self, wait: Callable[[str | None], bool]) -> bool:
        """Queue until this process is first. False if `wait` says no, which it is asked at each look with the holder.

        `wait` gets the holder's process token, or None while the order is not known.
        """
        while True:
            self._draw_ticket()
            while (ahead := self._ahead()) is not None:
                if not ahead:
                    return True
                if not wait(ahead[0].user_attrs.get(_PROCESS)):
                    self.release()
                    return False
                time.sleep(self._patience.poll_s)
            self._beats.drop(self._ticket)

    def release(self) -> None:
        """Let the next one go; also for those that only waited. A lease that is lost already is no error."""
        while self._leave():
            time.sleep(self._patience.poll_s * random.random())
            with suppress(KeyError):
                self._draw_ticket_in(self._storage.get_study_id_from_name(self._name))

    def tidy(self) -> None:
        """Take away what processes that died left of the lease, if nobody holds it or waits for it."""
        with suppress(KeyError):
            self._draw_ticket_in(self._storage.get_study_id_from_name(self._name))
            self.release()

    def _leave(self) -> bool:
        """Give the ticket back; true if the study stays with nobody in it, because all left in the same moment."""
        self._beats.drop(self._ticket)
        with suppress(*_Vanished):
            if self._is_there() and self._is_alone():
                # With the ticket still held, or one who queues now could be first, and then lose its ticket.
                self._storage.delete_study(self._study_id)
            # PostgreSQL keeps the study, and Optuna says nothing, where another has queued in that moment. A ticket
            # that is gone must not be ended: SQLite gives ids out again, so its id may be a trial of somebody else.
            if self._is_there():
                self._storage.set_trial_state_values(self._trial_id, TrialState.FAIL)
                return self._is_alone()
        return False

    @contextmanager
    def held(self, wait: Callable[[str | None], bool] = lambda _holder: True) -> Iterator[bool]:
        """Acquired in here; gives whether it was."""
        acquired = False
        try:
            acquired = self.acquire(wait)
            yield acquired
        finally:
            self.release()

    def _draw_ticket(self) -> None:
        while True:
            with suppress(KeyError):  # deleted since
                self._draw_ticket_in(self._find_study())
                return

    def _draw_ticket_in(self, study_id: int) -> None:
        """Raises: KeyError if the study has been deleted."""
        nonce = uuid.uuid4().hex
        attrs = {_TICKET: nonce, _PROCESS: process_token(), _BEAT: 0}
        ticket = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attrs)
        trial_id = self._storage.create_new_trial(study_id, template_trial=ticket)
        self._ticket, self._study_id, self._trial_id = nonce, study_id, trial_id
        self._beats.keep(self._ticket, lambda count: self._storage.set_trial_user_attr(trial_id, _BEAT, count))

    def _find_study(self) -> int:
        while True:
            try:
                return self._storage.create_new_study([StudyDirection.MAXIMIZE], self._name)
            except optuna.exceptions.DuplicatedStudyError:
                with suppress(KeyError):  # deleted since
                    return self._storage.get_study_id_from_name(self._name)

    def _ahead(self) -> list[FrozenTrial] | None:
        """Live tickets before this one; None if this one is gone with its study."""
        try:
            tickets = sorted(self._tickets(), key=lambda one: one.number)
        except _Vanished:
            return None
        own = next((one for one in tickets if self._is_own(one)), None)
        if own is None:
            return None
        return [one for one in tickets if one.number < own.number and not self._is_dead(one)]

    def _tickets(self) -> list[FrozenTrial]:
        trials = self._storage.get_all_trials(self._study_id, deepcopy=False)
        return [one for one in trials if one.state == TrialState.RUNNING]

    def _is_alone(self) -> bool:
        return all(self._is_own(one) or self._is_dead(one) for one in self._tickets())

    def _is_there(self) -> bool:
        return any(self._is_own(one) for one in self._tickets())

    def _is_own(self, ticket: FrozenTrial) -> bool:
        return bool(ticket.user_attrs.get(_TICKET) == self._ticket)

    def _is_dead(self, ticket: FrozenTrial) -> bool:
        attrs = ticket.user_attrs
        if _PROCESS not in attrs:
            return self._witness.is_forgotten((self._name, ticket.number))
        return attrs[_PROCESS] != process_token() and self._witness.is_dead(attrs[_PROCESS], attrs.get(_BEAT))
