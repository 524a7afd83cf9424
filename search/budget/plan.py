"""Plan: how much of everything a run measures within its budget of time.

The one place that decides what the budget is spent on. The phases ask it, before each of them anew with the time that
is left, so that what one phase leaves goes to the next ones. What is cut, and in which order, is in `Work.levels`.
Predictions and trials keep a share each, and take what the others leave; the confirm stage is planned with the rest,
and always runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from search.budget.pace import Pace
from search.budget.work import COST_REPEATS, GOOD_NUMBER, TRIAL_OVERHEAD, Amounts, Work
from search.measure.reference import ReferenceOptions
from search.measure.subject import Subject
from search.study.prompts import EncodedPrompt
from search.study.spec import StudySpec

_MEASURED_ONCE = ("prompts_per_trial", "num_texts", "max_new_tokens", "num_noise_pairs")
"""Amounts of the first run."""
_OUTLOOK_SHARE, _SEARCH_SHARE = 0.2, 0.4
"""Of the budget: what predictions and trials may count on, as far as they would take so long."""
_LATE_SEARCH_SHARE = 0.6
"""Trials: of what is left once the predictions are made, about as much."""
_MARGIN = 0.04
"""Of the budget: for figures and files, and for steps that take longer than those that were timed."""
_COSTS_SHARE = 0.4
"""Of the time for predictions: for the costs of the steps."""


@dataclass(frozen=True)
class Plan:
    """What a run measures, and how long its phases take."""

    asked: Amounts
    amounts: Amounts
    asked_s: Mapping[str, float]
    """By phase, without a budget."""
    seconds: Mapping[str, float]
    """By phase."""
    num_trials: int
    """For which there is time."""
    budget_s: float | None
    """That was left; None = no budget."""
    cost_repeats: int | None = None
    """Of measuring the costs; None = as often as ever."""

    @property
    def cuts(self) -> list[str]:
        """What there is less of than was asked for, in words."""
        return self.amounts.cuts_from(self.asked)

    @property
    def total_s(self) -> float:
        """All phases."""
        return sum(self.seconds.values())

    @property
    def limits(self) -> bool:
        """Whether the budget is shorter than what was asked for."""
        return self.budget_s is not None and self.total_s < sum(self.asked_s.values())

    @property
    def until_confirm_s(self) -> float:
        """Seconds from now until the confirm stage has to begin."""
        return math.inf if self.budget_s is None else (1 - _MARGIN) * self.budget_s - self.seconds["confirm"]

    @property
    def outlook_s(self) -> float | None:
        """Seconds that the costs and all predictions may take; None = as long as they like."""
        return self.seconds["outlook"] if self.limits else None

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        rounded = ({name: round(value, 1) for name, value in one.items()} for one in (self.asked_s, self.seconds))
        asked_s, expected_s = rounded
        return {
            "left_s": self.budget_s,
            "expected_s": expected_s,
            "expected_without_budget_s": asked_s,
            "asked": asdict(self.asked),
            "used": asdict(self.amounts),
            "cuts": self.cuts,
        }

    def to_json(self) -> str:
        """What was asked for and what is measured, as one line, for a study's attributes."""
        return json.dumps({"asked": asdict(self.asked), "used": asdict(self.amounts)}, separators=(",", ":"))


def read_plan(text: str | None) -> tuple[Amounts, Amounts] | None:
    """(asked for, measured) of a study's first run; None where it keeps none."""
    data = json.loads(text or "{}")
    return (Amounts(**data["asked"]), Amounts(**data["used"])) if data else None


def recorded(minutes: float | None, first: tuple[Amounts, Amounts], plan: Plan, confirm: Plan) -> dict[str, Any]:
    """What a run's plan was and what it measured, as JSON values: of the reference what the study's first run did, of
    the confirm stage what this one does.

    first: as `read_plan`; plan: at the start; confirm: before the confirm stage.
    """
    once = [{name: getattr(one, name) for name in _MEASURED_ONCE} for one in first]
    asked, used = replace(confirm.asked, **once[0]), replace(confirm.amounts, **once[1])
    amounts = {"asked": asdict(asked), "used": asdict(used), "cuts": used.cuts_from(asked)}
    return {"minutes": minutes} | plan.facts() | amounts


def make_plan(work: Work, pace: Pace, left_s: float | None, *, spent_s: float = 0.0, at_least: bool = False) -> Plan:
    """The most that fits into the seconds that are left; all of it without a limit.

    left_s: below 0 where more than the budget is spent. spent_s: of the budget before. at_least: plan the least there
    is where nothing fits, as a run does that has begun, and one whose results belong to another's.
    Raises: ValueError naming the least budget if not even one trial and one pass of the confirm stage fit.
    """
    asked = work.amounts(pace)
    asked_s = work.seconds(asked, pace)
    budget_s = spent_s + (left_s or 0.0)
    left_s = None if left_s is None else max(0.0, left_s)
    usable_s = math.inf if left_s is None else (1 - _MARGIN) * left_s
    if sum(asked_s.values()) <= usable_s:
        return Plan(asked, asked, asked_s, asked_s, work.trials, left_s)
    full = asked
    if not work.is_begun:
        good_s = _SEARCH_SHARE * usable_s / min(GOOD_NUMBER, max(1, work.trials))
        full = work.amounts(pace, min(work.trial_seconds, good_s / TRIAL_OVERHEAD))
        # As many texts as were asked for: to have fewer of them is decided below.
        full = replace(full, num_texts=asked.num_texts)
    for amounts in work.levels(full):
        parts = _Parts.of(work, amounts, pace)
        if parts.fixed_s + parts.reserved_s(usable_s) <= usable_s:
            break
    if parts.needed_s > usable_s and not at_least:
        least = math.ceil(100 * (spent_s + parts.needed_s / (1 - _MARGIN)) / 60) / 100
        over = f", of which {spent_s / 60:.2f} are over," if spent_s >= 0.6 else ","
        raise ValueError(
            f"budget_minutes: must be at least {least:g} here{over} for one trial and one pass of the confirm stage on "
            f"{amounts.num_held_out} held-out prompts, got {budget_s / 60:g}"
        )
    seconds = parts.shared_out(usable_s)
    num_trials = min(work.trials, int(seconds["search"] / parts.trial_s)) if parts.trial_s > 0 else 0
    for_costs_s = _COSTS_SHARE * seconds["outlook"]
    repeats = next((n for n in COST_REPEATS if work.costs_s(n, pace) <= for_costs_s), COST_REPEATS[-1])
    return Plan(asked, amounts, asked_s, seconds, num_trials, left_s, repeats)


@dataclass(frozen=True)
class _Parts:
    """Seconds by phase: as long as each would take, and the least of those that can do with less."""

    seconds: Mapping[str, float]
    least_outlook_s: float
    trial_s: float
    """The least of the search; 0 where no trial is left."""
    search_share: float
    """Of what is left: what the trials may count on."""

    @classmethod
    def of(cls, work: Work, amounts: Amounts, pace: Pace) -> _Parts:
        seconds = work.seconds(amounts, pace)
        has_trials = work.trials > 0 and "search" not in work.over
        least_s = min(seconds["outlook"], work.least_outlook_s(amounts, pace))
        share = _LATE_SEARCH_SHARE if "outlook" in work.over else _SEARCH_SHARE
        return cls(seconds, least_s, work.trial_s(amounts, pace) if has_trials else 0.0, share)

    @property
    def fixed_s(self) -> float:
        """Of the phases whose time follows from the amounts."""
        return self.seconds["reference"] + self.seconds["confirm"]

    @property
    def needed_s(self) -> float:
        """Of all phases at least."""
        return self.fixed_s + self.least_outlook_s + self.trial_s

    def reserved_s(self, usable_s: float) -> float:
        """What predictions and trials may count on."""
        outlook_s = max(self.least_outlook_s, min(self.seconds["outlook"], _OUTLOOK_SHARE * usable_s))
        return outlook_s + max(self.trial_s, min(self.seconds["search"], self.search_share * usable_s))

    def shared_out(self, usable_s: float) -> dict[str, float]:
        """All of it by phase: predictions have their share, trials the rest, and predictions what these leave."""
        room_s = max(0.0, usable_s - self.fixed_s)
        wanted_s = min(self.seconds["outlook"], _OUTLOOK_SHARE * usable_s, room_s - self.trial_s)
        outlook_s = max(self.least_outlook_s, wanted_s)
        search_s = max(self.trial_s, min(self.seconds["search"], room_s - outlook_s))
        outlook_s = max(outlook_s, min(self.seconds["outlook"], room_s - search_s))
        return {**self.seconds, "outlook": outlook_s, "search": search_s}


def spread(prompts: Sequence[EncodedPrompt], count: int) -> tuple[EncodedPrompt, ...]:
    """So many of them, evenly spread over their order: files are often sorted by what prompts are about."""
    count = min(count, len(prompts))
    return tuple(prompts[i * len(prompts) // count] for i in range(count))


def reference_options(spec: StudySpec, subject: Subject, plan: Plan | None = None) -> ReferenceOptions:
    """A study's; as many prompts as the plan has, where a budget limits them."""
    options = ReferenceOptions(
        subject.space.num_layers,
        spec.seed,
        spec.trial_seconds,
        spec.prompts_per_trial,
        is_sampled=subject.sampling.do_sample,
    )
    if plan is None or not plan.limits:
        return options
    amounts = plan.amounts
    return replace(
        options,
        prompts_per_trial=amounts.prompts_per_trial,
        max_texts=amounts.num_texts,
        num_noise_pairs=amounts.num_noise_pairs,
    )
