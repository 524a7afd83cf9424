"""Outlook: all predictions of one study, made before its first trial, stored with it and kept up to date."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from layerskip.config.decode_config import DecodeConfig
from search.budget.plan import Plan
from search.budget.work import NUM_TIMED_TEXTS
from search.measure.decoder import Forcing, Timer
from search.measure.reference import Reference
from search.outlook.forecast import Candidates, Pool
from search.predict.costs import NUM_REPEATS, CostModel, measure_costs, pool_costs
from search.predict.learnt_costs import learnt_costs_of
from search.predict.more_texts import MoreTexts
from search.predict.predictor import Predictor
from search.predict.replay import TextRows
from search.predict.sensitivity import Sensitivity
from search.study.attributes import (
    CANNOT_WIN,
    COSTS,
    DRAFT_STEP_MS,
    FORECAST_RATIOS,
    FORECAST_SPEEDUP,
    GAMMA_LOWERED,
    MORE,
    POOL,
    PREDICTED_RATIOS,
    REPLAYED_FORWARDS,
    SENSITIVITY,
    TEXTS,
)
from search.study.config_words import describe
from search.study.fingerprint import Fingerprint
from search.study.space import SearchSpace
from search.study.spec import StudySpec

_RECHECK_REPEATS = 7
RECHECK_EVERY = 20


@dataclass(frozen=True)
class OutlookOptions:
    """How much to spend on predictions."""

    max_new_tokens: int
    seed: int
    trials: int
    trial_seconds: float
    """That a full trial takes."""
    timeout_s: float | None = None
    """Time limit of all trials."""
    seconds: float | None = None
    """For everything before the first trial; None = a share of what the trials may take."""
    cost_repeats: int = NUM_REPEATS
    """Of measuring the costs."""

    @classmethod
    def of(cls, spec: StudySpec, reference: Reference, plan: Plan | None = None) -> OutlookOptions:
        """A study's, by what its trials really take: their number of prompts has bounds, or is the spec's own, so they
        may be far from `spec.trial_seconds`. With a plan, as much time as that has for it."""
        seconds, repeats = (None, None) if plan is None else (plan.outlook_s, plan.cost_repeats)
        return cls(
            spec.max_new_tokens,
            spec.seed,
            spec.trials,
            reference.trial_s,
            spec.timeout_s,
            seconds,
            repeats or NUM_REPEATS,
        )

    @property
    def search_s(self) -> float:
        """Seconds that all trials may take."""
        whole = self.trials * self.trial_seconds
        return whole if self.timeout_s is None else min(whole, self.timeout_s)


@dataclass
class Outlook:
    """What is predicted, and how to predict more."""

    space: SearchSpace
    predictor: Predictor
    candidates: Candidates
    pool: Pool
    sensitivity: Sensitivity
    num_readings: int
    """A proposal's."""
    timer: Timer
    texts: tuple[tuple[int, ...], ...]
    """Texts whose steps are timed."""
    force: Callable[[Sequence[int]], tuple[Forcing, TextRows]]
    """Of the reference's texts at these places."""
    costs: list[CostModel]
    """Every measurement of the costs, the first one made before the trials."""
    fingerprint: Fingerprint
    options: OutlookOptions
    seconds: dict[str, float] = field(default_factory=dict)

    def describe_trial(
        self, config: DecodeConfig, steps: Sequence[int], earlier: Sequence[FrozenTrial]
    ) -> dict[str, Any]:
        """Attributes of a trial about to be measured on the prompts at `steps`: what it is expected to show.

        `predicted_ratios` are as sharp as can be; `forecast_ratios` are those that configs are ranked by, and
        `forecast_speedup` is their mean over all texts, more than any trial decodes: so what a config owes to its own
        prompts, or to the tuning prompts, can be told apart from what it is worth, see `interactions_of`.
        Cost: a full-fidelity reading, if the mask was not proposed for one, and a few readings, see `Predictor.trial`;
        a target forward over each of the prompts' texts that were too many to be read for every mask.
        """
        self.predictor.learn(earlier)
        extra = self.predictor.extra_texts(steps, self.force)
        sharp = self.predictor.trial(config, steps, extra)
        forecast, mean = self.predictor.forecast(config, steps, extra)
        return {
            PREDICTED_RATIOS: [round(ratio, 5) for ratio in sharp.ratios],
            FORECAST_RATIOS: [round(ratio, 5) for ratio in forecast],
            FORECAST_SPEEDUP: round(mean, 5),
            REPLAYED_FORWARDS: [list(counts) for counts in sharp.forwards],
            DRAFT_STEP_MS: round(1000 * sharp.draft_s, 5),
        }

    def recheck(self, study: optuna.Study) -> float:
        """Measure the costs again, store them, and use the latest ones pooled.

        Returns how the cost of verifying four tokens, in target steps, has changed since the first measurement.
        """
        repeats = min(_RECHECK_REPEATS, self.options.cost_repeats)
        seed = self.options.seed
        new = measure_costs(self.timer, self.texts, self.space, self.fingerprint, repeats=repeats, seed=seed)
        if (stored := study.user_attrs.get(COSTS)) is not None:  # with what other workers have measured since
            self.costs = [CostModel.from_json(one, self.fingerprint) for one in json.loads(stored)]
        self.costs.append(new)
        self.predictor.set_costs(pool_costs(self.costs))
        store_costs(study, self.costs)
        return _verification_cost(self.costs[-1]) / _verification_cost(self.costs[0])

    def cannot_win(self) -> str | None:
        """Why no config is expected to beat plain decoding, with the numbers; None if one is.

        Predictions leave the loop's overhead out, so they are optimistic: what they rule out is ruled out.
        """
        best = self.pool.best
        speedup = math.exp(best.log_speedup)
        if speedup > 1.0:
            return None
        config = self.space.to_config(best.params)
        if not config.drafts_by_mask:
            return (
                f"no config can win here: the best of {len(self.pool.candidates)} predicted, {describe(config)}, "
                f"reaches {speedup:.3f}x before overhead"
            )
        cost, mask = self.predictor.cost, config.skip_mask
        draft = cost.draft_s(mask, threshold=config.draft_threshold > 0) / cost.verify_s[0]
        agreement = self.predictor.agreement(mask, full_fidelity=True)
        return (
            f"no config can win here: the best of {len(self.pool.candidates)} predicted masks, {mask} at gamma "
            f"{config.gamma}, reaches {speedup:.3f}x before overhead; its draft agrees with the target in "
            f"{agreement:.2f} of cases at {draft:.2f} target steps a token, and "
            f"verifying {config.gamma} costs {cost.verify_s[config.gamma] / cost.verify_s[0]:.2f}"
        )


def describe_outlook(outlook: Outlook) -> list[str]:
    """A few lines for people."""
    cost, best = outlook.predictor.cost, outlook.pool.best
    config = outlook.space.to_config(best.params)
    alone = cost.verify_s[0]
    far = min(4, len(cost.verify_s) - 1)
    order = outlook.sensitivity.sublayers
    worst = sorted(order, key=lambda one: one.leave_one_out)[:3]
    keys = "" if outlook.predictor.keys == "target" else " (the draft's own keys throughout: an approximation)"
    lines = [
        f"one target token {1000 * alone:.2f} ms, verifying {far} drafts {cost.verify_s[far] / alone:.2f} of that; "
        f"a draft token {cost.fixed_s / alone:.2f} + {cost.attention_s[0] / alone:.3f} an attention + "
        f"{cost.mlp_s[0] / alone:.3f} an MLP",
        f"hardest to do without: {', '.join(f'{one.name} (agreement {one.leave_one_out:.2f})' for one in worst)}",
        f"{len(outlook.pool.candidates)} configs predicted on {_texts(outlook)}{keys}; best "
        f"{math.exp(best.log_speedup):.2f}x: {describe(config)}",
    ]
    if not worst:
        del lines[1]
    by_drafter = outlook.candidates.best_by_drafter(outlook.pool)
    if len(by_drafter) > 1:
        words = (f"{name} {math.exp(one.log_speedup):.2f}x" for name, one in by_drafter.items())
        lines.append(f"predicted by drafter: {', '.join(words)}")
    return lines


def _texts(outlook: Outlook) -> str:
    predictor = outlook.predictor
    if not predictor.has_more:
        return f"{predictor.num_texts} texts"
    return f"{predictor.num_first} texts, the best {outlook.pool.num_full_fidelity} on {predictor.num_texts}"


def outlook_facts(study: optuna.Study) -> dict[str, Any]:
    """`costs`, `sensitivity` and `pool` of summary.json, from what the study keeps."""
    attrs = study.user_attrs
    pool = json.loads(attrs.get(POOL, "[]"))
    return {
        "costs": _cost_facts(study),
        "sensitivity": json.loads(attrs[SENSITIVITY]) if SENSITIVITY in attrs else None,
        "pool": {"num_predicted": len(pool), "best": pool[:3]},
        "texts": _text_facts(attrs),
        "cannot_win": attrs.get(CANNOT_WIN),
        GAMMA_LOWERED: attrs.get(GAMMA_LOWERED),
    }


def _cost_facts(study: optuna.Study) -> dict[str, Any] | None:
    """The first and the latest measurement of the costs, how many there are, and what the trials taught about them."""
    history: list[str] = json.loads(study.user_attrs.get(COSTS, "[]"))
    if not history:
        return None
    first, last, learnt = json.loads(history[0]), json.loads(history[-1]), learnt_costs_of(study, history)
    in_trials = None if learnt is None else json.loads(learnt.to_json())
    return {"first": first, "last": last, "num_measured": len(history), "learnt": in_trials}


def _text_facts(attrs: Mapping[str, Any]) -> dict[str, int] | None:
    """How many texts were predicted on: the first ones, and on top of them those of the reference and those made."""
    if TEXTS not in attrs:
        return None
    more = MoreTexts.from_json(attrs[MORE]) if MORE in attrs else MoreTexts()
    return {"num_first": attrs[TEXTS], "num_reference_more": more.num_reference, "num_made": len(more.made)}


def store_costs(study: optuna.Study, costs: Sequence[CostModel]) -> None:
    """Keep every measurement of the costs."""
    study.set_user_attr(COSTS, json.dumps([one.to_json() for one in costs]))


def texts_to_time(reference: Reference, gamma_max: int, most_new: int | None = None) -> tuple[tuple[int, ...], ...]:
    """A few texts of middling length, each up to about the middle of its continuation.

    With gamma_max + 1 tokens more they are no longer than what decoding makes of them, so the model has the positions.
    most_new: of a continuation, where steps of more tokens are timed.
    """
    room = gamma_max + 1
    cases = [case for case in reference.cases if len(case.reference_ids) > room]
    cases.sort(key=lambda case: len(case.prompt_ids) + len(case.reference_ids))
    middle = max(0, (len(cases) - NUM_TIMED_TEXTS) // 2)

    def cut(length: int) -> int:
        found = min(length // 2, length - room)
        return found if most_new is None else min(found, most_new)

    chosen = cases[middle : middle + NUM_TIMED_TEXTS]
    return tuple(case.prompt_ids + case.reference_ids[: cut(len(case.reference_ids))] for case in chosen)


def _verification_cost(cost: CostModel) -> float:
    return cost.verify_s[min(4, len(cost.verify_s) - 1)] / cost.verify_s[0]
