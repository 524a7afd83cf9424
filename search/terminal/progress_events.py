"""Events on the way to a result: preflight, study, reference, outlook, search, trials, drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from layerskip.config.decode_config import number_format
from search.budget.pace import Pace
from search.budget.plan import Plan
from search.measure.reference import Reference
from search.measure.subject import Subject
from search.outlook.outlook import Outlook, describe_outlook
from search.study.attributes import LOOKUP, TRIAL_DRAFTER
from search.study.leaderboard import Entry
from search.study.trials import tokens_per_s_of
from search.terminal.event import Event, Line, Told, config_fields
from search.terminal.text import duration, trial_line

_OF_FINGERPRINT = ("model_class", "dtype", "quantization", "device", "num_threads", "engine")
_NOTABLE_DRIFT = 0.1
LONG_S = 1800.0
"""A run that will take longer is told that it need not."""


def preflight_passed(
    subject: Subject,
    group_field: str,
    regimes: Sequence[str],
    groups: Mapping[str, tuple[int, int]] | None = None,
    *,
    is_split: bool,
) -> Event:
    """The model and the prompts are fit to be searched.

    regimes: ways to choose tokens, each searched apart; groups: tuning and held-out prompts of each, in a per-group
    search; is_split: the held-out prompts were split off from the tuning prompts.
    """
    space, print_ = subject.space, subject.fingerprint
    threads = "thread" if print_.num_threads == 1 else "threads"
    split = " (split off, by content hash)" if is_split else ""
    texts = [
        f"{subject.model}: {print_.model_class}, {space.num_layers} layers, "
        f"{number_format(print_.dtype, print_.quantization)} on {print_.device}, {print_.num_threads} {threads}, "
        f"engine {print_.engine}",
        f"{len(subject.tuning)} tuning and {len(subject.held_out)} held-out prompts{split}, "
        f"{len(space.bit_names)} mask bits, gamma 1..{space.gamma_max}, two thresholds"
        + (f", {', '.join(map(str, space.draft_vocabs))} token ids" if space.draft_vocabs else "")
        + (f", weights as they are or of {' or '.join(map(str, space.draft_bits))} bits" if space.draft_bits else "")
        + (f", 0..{space.siblings_max} siblings" if space.siblings_max else "")
        + (f", trees of {', '.join(map(str, space.trees[1:]))}" if space.trees else ""),
    ]
    texts.append(f"drafters {', '.join(space.drafters)}; {', '.join(regimes)}")
    if subject.threads is not None:
        texts.insert(1, str(subject.threads))
    if groups is not None:
        counts = "; ".join(f"{name!a} {tuning} and {held_out}" for name, (tuning, held_out) in groups.items())
        texts.append(f"tuning and held-out prompts by {group_field!a}: {counts}")
    facts = {
        "model": subject.model,
        **{name: getattr(print_, name) for name in _OF_FINGERPRINT},
        **{name: getattr(space, name) for name in ("num_layers", "gamma_max", "int8", "int4", "siblings_max")},
        "trees": list(space.trees),
        "ms_by_threads": None if subject.threads is None else dict(subject.threads.ms_by_threads),
        "num_tuning_prompts": len(subject.tuning),
        "num_held_out_prompts": len(subject.held_out),
        "num_mask_bits": len(space.bit_names),
        "drafters": list(space.drafters),
        "regimes": list(regimes),
        "groups": groups,
    }
    return Told("preflight", [Line(text, "preflight") for text in texts], facts)


@dataclass(frozen=True)
class StudyOpened(Event):
    """A study was made or reopened."""

    name = "study"
    study: str
    storage: str
    num_done: int
    num_trials: int

    def lines(self) -> list[Line]:
        return [Line(f"{self.study} in {self.storage}: {self.num_done} of {self.num_trials} trials done", "study")]


@dataclass(frozen=True)
class Planned(Event):
    """How long the run will take and what takes it; with a budget, and what is measured less for it."""

    name = "plan"
    plan: Plan
    pace: Pace
    num_trials: int
    """That are still to be measured, without a budget."""
    shorter: Plan | None = None
    """With a budget of `LONG_S`, where there is none and everything takes longer."""

    def lines(self) -> list[Line]:
        plan, pace = self.plan, self.pace
        steps = f"a token takes {_ms(pace.token_s)}, a prompt {_ms(pace.prompt_s)}"
        texts = [f"{'without a budget' if plan.limits else 'in all'} at most about {phases(plan.asked_s)}; {steps}"]
        if plan.limits:
            texts.append(f"with {duration(plan.budget_s or 0.0)} left about {phases(plan.seconds)}")
            texts.append(f"for that {self._less(plan)}")
        elif plan.budget_s is not None:
            texts.append(f"within the {duration(plan.budget_s)} that are left, so nothing is cut")
        if self.shorter is not None:
            minutes = round(LONG_S / 60)
            texts.append(f"--budget {minutes} would end within {minutes} minutes, with {self._less(self.shorter)}")
        return [Line(text, "plan") for text in texts]

    def _less(self, plan: Plan) -> str:
        fewer = plan.num_trials < self.num_trials
        trials = [f"about {plan.num_trials} of {self.num_trials} trials"] if fewer else []
        return ", ".join([*plan.cuts, *trials]) or "shorter predictions"

    def fields(self) -> dict[str, Any]:
        return {
            "token_ms": 1000 * self.pace.token_s,
            "prompt_ms": 1000 * self.pace.prompt_s,
            "num_trials": self.plan.num_trials,
            **self.plan.facts(),
        }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def phases(seconds: Mapping[str, float]) -> str:
    """The total and what it is made of, in words."""
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
    return f"{duration(sum(seconds.values()))}: {parts}"


@dataclass(frozen=True)
class ReferenceKnown(Event):
    """Plain decoding was measured, or read from the study; `now`: its speed then against the stored one."""

    name = "reference"
    reference: Reference
    now: float | None = None

    def lines(self) -> list[Line]:
        one = self.reference
        facts = [
            f"plain {one.plain_tokens_per_s:.1f} tok/s",
            f"A/A noise {100 * one.noise_sigma:.1f} % a pair",
            f"{one.num_per_trial} of {len(one.cases)} prompts a full trial",
        ]
        facts += [f"{len(one.dropped)} prompts too short to time"] if one.dropped else []
        facts += [f"stored; now {self.now:.2f} times as fast"] if self.now is not None else []
        return [Line(", ".join(facts), "reference")]

    def fields(self) -> dict[str, Any]:
        one = self.reference
        return {
            "plain_tokens_per_s": one.plain_tokens_per_s,
            "noise_sigma": one.noise_sigma,
            "num_prompts_per_trial": one.num_per_trial,
            "num_prompts": len(one.cases),
            "num_too_short": len(one.dropped),
            "now_times_stored": self.now,
        }


def foreseen(outlook: Outlook) -> Event:
    """What is predicted before the first trial."""
    cost, best = outlook.predictor.cost, outlook.pool.best
    facts = {
        "target_token_ms": 1000 * cost.verify_s[0],
        "verify_ms": [1000 * seconds for seconds in cost.verify_s],
        "num_masks": len(outlook.pool.candidates),
        "num_texts": outlook.predictor.num_texts,
        "best_speedup": math.exp(best.log_speedup),
        **config_fields(outlook.space.to_config(dict(best.params))),
    }
    return Told("outlook", [Line(text, "outlook") for text in describe_outlook(outlook)], facts)


@dataclass(frozen=True)
class SearchBegins(Event):
    """Trials follow."""

    name = "search"
    num_done: int
    num_trials: int
    sampler: str
    seed: int

    def lines(self) -> list[Line]:
        text = f"{self.num_trials - self.num_done} trials, sampler {self.sampler}, seed {self.seed}"
        return [Line(text, "search")]


@dataclass(frozen=True)
class TrialDone(Event):
    """A trial has ended, well or not; `leader` is the study's best config so far."""

    name = "trial"
    trial: FrozenTrial
    num_done: int
    num_trials: int
    leader: Entry | None
    eta_s: float

    @property
    def is_good(self) -> bool:
        """It has numbers."""
        return self.trial.state == TrialState.COMPLETE

    def lines(self) -> list[Line]:
        best = f"{self.leader.speedup:.2f}x #{self.leader.trials[0]}" if self.leader else "none yet"
        text = trial_line(self.trial, self.num_done, self.num_trials, best)
        return [Line(f"{text}  eta {duration(self.eta_s)}", style=None if self.is_good else "red")]

    def fields(self) -> dict[str, Any]:
        attrs, params = self.trial.user_attrs, self.trial.params
        kept = (
            "speedup speedup_ci_low speedup_ci_high stopped_early lossless num_prompts origin repeat_of skip_mask "
            "acceptance_rate mean_accepted_length seconds violation failure"
        )
        return {
            "number": self.trial.number,
            "num_done": self.num_done,
            "num_trials": self.num_trials,
            "state": self.trial.state.name.lower(),
            # A pruned trial's value is the last thing it reported, not its speed.
            "tokens_per_s": tokens_per_s_of(self.trial) if self.is_good else None,
            **{key: attrs.get(key) for key in kept.split()},
            **{key: params.get(key) for key in ("gamma", "draft_threshold", "target_threshold")},
            "drafter": attrs.get(TRIAL_DRAFTER),
            "lookup": attrs.get(LOOKUP),
            "best_trial": self.leader.trials[0] if self.leader else None,
            "best_speedup": self.leader.speedup if self.leader else None,
            "best_speedup_lower": self.leader.lower if self.leader else None,
            "eta_s": self.eta_s,
        }


@dataclass(frozen=True)
class Drifted(Event):
    """The costs were measured again: verifying four tokens costs so many times what it did at the start."""

    name = "drift"
    verify_times: float

    @property
    def is_notable(self) -> bool:
        """More than a measurement's own scatter."""
        return abs(self.verify_times - 1.0) > _NOTABLE_DRIFT

    def lines(self) -> list[Line]:
        if not self.is_notable:
            return []
        text = f"verifying four tokens costs {self.verify_times:.2f} times what it did at the start"
        return [Line(text, "drift")]
