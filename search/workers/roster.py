"""Roster: the workers of a study, each with a number, a stage and signs of life, in the study's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from search.study.attributes import PROCESS, WORKER_ENTRY
from search.workers.heartbeats import Beats, Witness
from search.workers.process import describe_process, process_token

Stage = Literal["search", "done", "confirm", "left"]
"""Measuring trials; through with them; measuring the held-out prompts; gone."""


@dataclass(frozen=True)
class Worker:
    """One entry. Numbers of workers that have left or died are given out again."""

    number: int
    process: str
    stage: Stage = "search"
    beat: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What it measures on: `device`, `cores` and the like."""

    @property
    def name(self) -> str:
        """For people."""
        return f"worker {self.number} ({describe_process(self.process)})"


class Roster:
    """Who works on one study, this process among them once it has joined."""

    def __init__(self, storage: BaseStorage, study_id: int, beats: Beats, witness: Witness) -> None:
        self._storage, self._study_id = storage, study_id
        self._beats, self._witness = beats, witness
        self._own: Worker | None = None
        self.is_lost = False
        """Others took this process for dead and gave its number away."""
        self.current: int | None = None
        """The trial that this worker is at: what else is running in this process's name was left by an earlier run."""

    @property
    def number(self) -> int:
        """This worker's; 0 before it has joined."""
        return self._own.number if self._own else 0

    @property
    def facts(self) -> Mapping[str, Any]:
        """What this worker measures on."""
        return self._own.facts if self._own else {}

    def join(self, facts: Mapping[str, Any]) -> None:
        """Take the lowest free number. One process at a time: the caller holds a lease."""
        taken = {one.number for one in self.others()}
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        self._own, self.is_lost = Worker(number, process_token(), facts=dict(facts)), False
        self._write(self._own)
        self._beats.keep(WORKER_ENTRY, self._beat)

    def enter(self, stage: Stage) -> None:
        """Tell the others what this worker does now."""
        if self._own is not None and not self.is_lost and self._own.stage != stage:
            self._own = replace(self._own, stage=stage)
            self._write(self._own)

    def leave(self) -> None:
        """Give the number back."""
        self._beats.drop(WORKER_ENTRY)
        self.enter("left")
        self._own = None

    def others(self) -> list[Worker]:
        """The workers that are not known to be dead, without this one."""
        here = process_token()
        return [one for one in self._entries() if one.process != here and not self.is_dead(one)]

    def is_dead(self, worker: Worker) -> bool:
        """Whether it has left, or is known to have died."""
        return worker.stage == "left" or self._witness.is_dead(worker.process, worker.beat)

    def is_heard(self, worker: Worker) -> bool:
        """Whether it is known to live: a process of this host, or one that has given a sign since it was first seen."""
        return self._witness.is_sure(worker.process, worker.beat)

    def are_unsure(self, trials: list[FrozenTrial]) -> bool:
        """Whether some running trial's worker is neither known to live nor known to be dead."""
        beats = {one.process: one.beat for one in self._entries()}
        orphans = {one.number for one in self.orphans(trials)}
        running = [one for one in trials if one.state == TrialState.RUNNING and one.number not in orphans]
        tokens = [one.user_attrs.get(PROCESS) for one in running]
        return any(token is None or not self._witness.is_sure(token, beats.get(token)) for token in tokens)

    def orphans(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """The running trials whose worker is known to be dead."""
        here = process_token()
        running = [one for one in trials if one.state == TrialState.RUNNING]
        if not running:
            return []
        beats = {one.process: one.beat for one in self._entries()}
        others = self.others()
        dead = []
        for trial in running:
            token = trial.user_attrs.get(PROCESS)
            if token == here:
                is_dead = trial.number != self.current
            elif isinstance(token, str):
                is_dead = self._witness.is_dead(token, beats.get(token))
            else:  # just begun, by a worker that will say so in a moment; or it died in that moment
                is_dead = not others or self._witness.is_forgotten(("trial", trial.number))
            if is_dead:
                dead.append(trial)
        return dead

    def _beat(self, count: int) -> None:
        own = self._own
        if own is None or self.is_lost:
            return
        stored = self._storage.get_study_user_attrs(self._study_id).get(_key(own.number))
        if not isinstance(stored, dict) or stored.get("process") != own.process:
            self.is_lost = True
            return
        self._own = replace(self._own or own, beat=count)
        self._write(self._own)

    def _write(self, worker: Worker) -> None:
        self._storage.set_study_user_attr(self._study_id, _key(worker.number), asdict(worker))

    def _entries(self) -> list[Worker]:
        attrs = self._storage.get_study_user_attrs(self._study_id)
        return [Worker(**attrs[name]) for name in sorted(attrs) if name.startswith(WORKER_ENTRY)]


def _key(number: int) -> str:
    return f"{WORKER_ENTRY}{number:02}"
