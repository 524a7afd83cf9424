"""RunPlan: one run's plan against its clock, made before the study is opened and looked at again before each phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna

from search.budget.plan import Plan, make_plan, read_plan, recorded
from search.budget.work import Amounts, Work
from search.context import Tools
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.preflight import pace_of, planned
from search.study.attributes import FIRST_PLAN, POOL, REFERENCE
from search.study.spec import StudySpec
from search.study.trials import counted
from search.terminal.progress_events import Planned


class RunPlan:
    """What a run measures. `subject` and `spec` are those to go on with: a budget may have cut their new tokens."""

    def __init__(
        self,
        subject: Subject,
        spec: StudySpec,
        tools: Tools,
        start: float,
        study: optuna.Study | None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Time a few steps and decide.

        start: of the run, by the tools' clock, loading the model included. study: to go on with, if there is one; what
        it decided on for its new tokens stays. goes_on: after another regime, whose new tokens are the spec's, however
        little of the budget that has left. Raises: ValueError if the budget is too short for anything.
        """
        self.subject, self.spec, self._tools, self._start = subject, spec, tools, start
        self._minutes = spec.budget_minutes
        self._first = None if study is None else read_plan(study.user_attrs.get(FIRST_PLAN))
        if self._first is not None and self._first[0].max_new_tokens == spec.max_new_tokens:
            self._use_tokens(self._first[1].max_new_tokens)
        pace = pace_of(self.subject, self.spec, tools.clock)
        work = self._work(study)
        if study is not None and REFERENCE in study.user_attrs:
            work = work.on(Reference.from_json(study.user_attrs[REFERENCE]))
        if goes_on:
            work = replace(work, tokens_are_fixed=True)
        self.told: Planned = planned(work, pace, self.left_s, self._spent_s, at_least=goes_on)
        self._first = self._first or (self.told.plan.asked, self.told.plan.amounts)
        self._use_tokens(self.told.plan.amounts.max_new_tokens)

    @property
    def at_start(self) -> Plan:
        """As it was decided on first."""
        return self.told.plan

    @property
    def left_s(self) -> float | None:
        """Of the budget, below 0 where more is spent; None without one."""
        return None if self._minutes is None else 60 * self._minutes - self._spent_s

    @property
    def _spent_s(self) -> float:
        return self._tools.clock() - self._start

    def after(self, study: optuna.Study, reference: Reference, *phases: str, num_candidates: int | None = None) -> Plan:
        """For what follows these phases, by the time that is left and the plain speed that was seen."""
        work = self._work(study).on(reference).after(*phases)
        if num_candidates is not None:
            work = replace(work, num_candidates=num_candidates)
        pace = self.told.pace.as_seen(reference.pair_s, self.spec.max_new_tokens)
        return make_plan(work, pace, self.left_s, at_least=True)

    def deadline(self, plan: Plan) -> float:
        """By the tools' clock, when the trials must be over for the confirm stage to have its share."""
        return self._tools.clock() + plan.until_confirm_s

    def facts(self, confirm: Plan) -> dict[str, Any]:
        """For summary.json; see `search.budget.plan.recorded`."""
        first: tuple[Amounts, Amounts] = self._first or (self.at_start.asked, self.at_start.amounts)
        return recorded(self._minutes, first, self.at_start, confirm)

    def _use_tokens(self, most: int) -> None:
        if most != self.spec.max_new_tokens:
            self.subject = self.subject.with_new_tokens(most)
            self.spec = self.spec.model_copy(update={"max_new_tokens": most})

    def _work(self, study: optuna.Study | None) -> Work:
        """What there is to do."""
        if study is None:
            return Work.of(self.spec, self.subject)
        names = {"reference": REFERENCE, "outlook": POOL}
        kept = frozenset(phase for phase, name in names.items() if name in study.user_attrs)
        work = Work.of(self.spec, self.subject, counted(study.get_trials(deepcopy=False)), kept)
        return replace(work, tokens_are_fixed=True)
