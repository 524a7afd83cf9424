"""Crew: one worker's part in a study that several may work on: join, set up once, measure, and who confirms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from search.storages.address import redact, storage_file
from search.storages.opening import check_storage, close_storage, open_storage
from search.study.attributes import NUM_CONFIRMED
from search.study.trials import counted
from search.workers.claims import Claims
from search.workers.device import share_a_device, strangers_on
from search.workers.heartbeats import Beats, Patience, Witness
from search.workers.lease import Lease
from search.workers.process import describe_process, pid_of
from search.workers.reaping import Reaped, Reaper
from search.workers.roster import Roster, Worker

_PURPOSES = ("set-up", "reap", "finish")
"""Of the leases."""


class StudyBusy(ValueError):  # noqa: N818 (reads as the fact it states)
    """Another live process is measuring on this study, and this search takes one at a time."""


class Crew:
    """What one worker knows of the others and tells them. `tell` gets remarks for people, `warn` what matters."""

    claims: Claims
    """After `join`."""

    def __init__(
        self,
        storage: BaseStorage,
        study_name: str,
        *,
        tell: Callable[[str], None] = lambda _text: None,
        warn: Callable[[str], None] = lambda _text: None,
        facts: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._storage, self._name = storage, study_name
        self._tell, self._warn, self._facts = tell, warn, dict(facts or {})
        self._patience = patience or Patience()
        self._witness = Witness(self._patience)
        self._beats = Beats(storage, self._patience.beat_s)
        self._roster: Roster | None = None
        self._told: set[str] = set()

    @property
    def roster(self) -> Roster:
        """Who works on the study; after `join`."""
        if self._roster is None:
            raise RuntimeError("the crew has not joined a study")
        return self._roster

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """One worker at a time in here: to create the study, to join, and to make what all workers share."""

        def wait(holder: str | None) -> bool:
            if holder is not None:
                self._tell_once(f"waiting for {describe_process(holder)}, which sets the study up")
            return True

        with self._lease("set-up").held(wait):
            yield

    def join(self, study: optuna.Study, *, alone: bool = False) -> None:
        """Become a worker of the study, and clear away what dead ones left. Within `setting_up`.

        Raises: StudyBusy if `alone` and another live process works on it.
        """
        self._study = study
        self._study_id = self._storage.get_study_id_from_name(study.study_name)
        self._roster = Roster(self._storage, self._study_id, self._beats, self._witness)
        if alone:
            self._watch(self._roster)
        others = self._roster.others()
        if alone and others:
            raise StudyBusy(
                f"study {study.study_name!r}: {others[0].name} is measuring on it; a per-group search takes one worker"
            )
        self._roster.join(self._facts)
        self._num_confirmed_before = self._num_confirmed()
        self.claims = Claims(self._storage, self._study_id, self._roster, self._patience)
        self._reaper = Reaper(study, self._storage, self._study_id, self._roster, lambda: self._lease("reap"))
        self.sweep()
        if others:
            self._tell(f"worker {self._roster.number}, beside {', '.join(one.name for one in others)}")
        self._warn_of_neighbours(others)

    def reap(self, study: optuna.Study) -> list[Reaped]:
        """Clear away what dead workers left, without becoming one; first waits until it is known who is dead."""
        study_id = self._storage.get_study_id_from_name(study.study_name)
        roster = Roster(self._storage, study_id, self._beats, self._witness)
        self._watch(roster)
        while roster.are_unsure(study.get_trials(deepcopy=False)):
            self._tell_once("watching workers of other hosts for signs of life")
            time.sleep(self._patience.poll_s)
        return Reaper(study, self._storage, study_id, roster, lambda: self._lease("reap")).sweep()

    def rejoin_if_lost(self) -> None:
        """Take a new number where the others have given this worker's away, because it slept."""
        if self.roster.is_lost:
            self._warn("the others took this worker for dead (did the machine sleep?): joining again")
            with self.setting_up():
                self.roster.join(self._facts)

    def sweep(self) -> list[Reaped]:
        """Fail and queue again what dead workers left; told, one line a trial."""
        done = self._reaper.sweep()
        for one in done:
            self._warn(str(one))
        return done

    def is_first(self) -> bool:
        """Whether no live worker has a lower number: the one that does what one has to do for all."""
        return all(one.number > self.roster.number for one in self.roster.others())

    def may_begin(self, total: int) -> bool:
        """Whether the study needs one more trial than are done and being measured."""
        self.claims.total = total
        trials = self._study.get_trials(deepcopy=False)
        return counted(trials) + _num_running(trials) < total

    def pause(self) -> None:
        """Wait a moment for the trials of others."""
        self._tell_once("waiting for the last trials of the other workers")
        time.sleep(self._patience.poll_s)

    def finish(self) -> str | None:
        """Whether this worker goes on to the confirm stage: None, or else why it does not. The last one out does it.

        Another host's worker of which nothing has been heard yet is waited for: it may be dead.
        """
        self.roster.enter("done")

        with self._lease("finish").held(lambda _holder: self.confirming() is None):
            while True:
                others = self.roster.others()
                if (confirming := self.confirming()) is not None:
                    return f"{confirming.name} confirms"
                if self._num_confirmed() > self._num_confirmed_before:
                    return "another worker has confirmed"
                searching = [one for one in others if one.stage == "search"]
                heard = [one for one in searching if self.roster.is_heard(one)]
                if heard:
                    return f"{heard[0].name} goes on; the last one confirms"
                if not searching:
                    self.roster.enter("confirm")
                    return None
                self._tell_once(f"waiting for a sign of life of {searching[0].name}")
                time.sleep(self._patience.poll_s)

    def leave(self) -> None:
        """Be a worker no more. Nothing here fails: the others find out anyhow."""
        with suppress(Exception):
            if self._roster is not None:
                self._roster.leave()
                for purpose in _PURPOSES:
                    self._lease(purpose).tidy()
        self._beats.stop()

    def confirming(self) -> Worker | None:
        """The live worker that is at the confirm stage."""
        return next((one for one in self.roster.others() if one.stage == "confirm"), None)

    def confirmed(self) -> None:
        """Tell those that come out of their last trial now that the results are written."""
        self._storage.set_study_user_attr(self._study_id, NUM_CONFIRMED, self._num_confirmed() + 1)

    def _warn_of_neighbours(self, others: list[Worker]) -> None:
        near = [one for one in others if share_a_device(self._facts, one)]
        if near:
            self._warn(
                f"{near[0].name} computes on the same device: the two disturb each other's timings, and their trials "
                "say so in shares_device; --workers and --devices give each a device or cores of its own"
            )
        known = {pid_of(one.process) for one in others}
        if strangers := strangers_on(self._facts, known):
            self._warn(f"process {strangers[0]} computes on the same device: it disturbs the timings")

    def _watch(self, roster: Roster) -> None:
        """Wait until every worker is known to live or to be dead: for those of other hosts, some minutes."""
        while any(not roster.is_heard(one) for one in roster.others()):
            self._tell_once("watching workers of other hosts for signs of life")
            time.sleep(self._patience.poll_s)

    def _num_confirmed(self) -> int:
        return int(self._storage.get_study_user_attrs(self._study_id).get(NUM_CONFIRMED, 0))

    def _lease(self, purpose: str) -> Lease:
        return Lease(self._storage, f"{self._name}/lease/{purpose}", self._beats, self._witness, self._patience)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def _num_running(trials: list[FrozenTrial]) -> int:
    return sum(one.state == TrialState.RUNNING for one in trials)


def reap(url: str, study_name: str, tell: Callable[[str], None], patience: Patience | None = None) -> int:
    """Fail and queue again every trial whose worker is dead. Returns the exit code.

    Workers of other hosts are watched for a sign of life first, which takes as long as `Patience` says.
    Raises: ValueError if there is no such study.
    """
    check_storage(url)
    file = storage_file(url)
    if file is not None and not file.is_file():
        raise ValueError(f"study {study_name!r}: no such study yet in {redact(url)}")
    storage = open_storage(url)
    crew = Crew(storage, study_name, tell=tell, patience=patience)
    try:
        try:
            study = optuna.load_study(study_name=study_name, storage=storage)
        except KeyError:
            raise ValueError(f"study {study_name!r}: no such study in {redact(url)}") from None
        done = crew.reap(study)
        for one in done:
            tell(str(one))
        if not done:
            tell("nothing to do: no trial of a dead worker")
    finally:
        crew.leave()
        close_storage(storage)
    return 0
