"""Outlook: all predictions of one study, made before its first trial, stored with it and kept up to date."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial

from layerskip.config import DecodeConfig
from layerskip.skip_mask import SkipMask
from layerskip.teacher_forcing import ForcedText
from search.correction import Correction
from search.cost_model import CostModel, CostOptions, Timer, measure_costs, pool_costs
from search.decoder import Decoder
from search.fingerprint import Fingerprint
from search.forecast import Candidates, Pool, make_pool
from search.predictor import Predictor
from search.proposals import ProposeOptions, Proposer
from search.reference import Reference
from search.replay import TextRows
from search.sensitivity import Sensitivity, measure_sensitivity
from search.space import SearchSpace

COSTS, SENSITIVITY, POOL = "cost_model", "sensitivity", "pool"
READINGS, TEXTS = "readings_per_proposal", "num_texts_read"
"""Attributes of the study."""
_RECHECK_REPEATS = 7
RECHECK_EVERY = 20
_NUM_TIMED_TEXTS = 3
_MIN_TEXTS = 4
_PREFLIGHT_SHARE = 0.05
"""Of the time that all trials may take: what predicting before the first one may."""
_MIN_PREFLIGHT_S = 10.0
_PROPOSAL_SHARE = 0.05
_MIN_PROPOSAL_S = 0.15
"""Predicting neighbours for one proposal: this, or the share of a trial's time if that is more."""
_MAX_READINGS = 8


@dataclass(frozen=True)
class OutlookOptions:
    """How much to spend on predictions."""

    max_new_tokens: int
    gamma_max: int
    seed: int
    trials: int
    trial_seconds: float


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
    costs: list[CostModel]
    """Every measurement of the costs, the first one made before the trials."""
    fingerprint: Fingerprint
    options: OutlookOptions
    seconds: dict[str, float] = field(default_factory=dict)

    def proposer(self, options: ProposeOptions) -> Proposer:
        """Proposes by these predictions."""
        from search.replay_proposer import ReplayProposer

        return ReplayProposer(self.space, options, self.candidates, self.pool, num_readings=self.num_readings)

    def describe_trial(
        self, trial_params: dict[str, Any], config: DecodeConfig, steps: Sequence[int], earlier: Sequence[FrozenTrial],
        noise_sigma: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Attributes of a trial about to be measured on the prompts at `steps`: what it is expected to show.

        `predicted_ratios` are corrected by what earlier trials taught, `replayed_ratios` are not; `forecast_ratios` are
        those that configs are ranked by, and `forecast_speedup` is their mean over all texts. Cost: a few readings and
        short drafts, see `Predictor.trial`.
        """
        sharp = self.predictor.trial(config, steps, self.timer, self.texts[0])
        forecast, mean = self.predictor.forecast(config, steps)
        correction = Correction(earlier, self.space, noise_sigma, "replayed_ratios")
        factor = math.exp(float(correction.of([trial_params])[0][0]))
        return {
            "predicted_ratios": [round(ratio * factor, 5) for ratio in sharp.ratios],
            "replayed_ratios": [round(ratio, 5) for ratio in sharp.ratios],
            "forecast_ratios": [round(ratio, 5) for ratio in forecast],
            "forecast_speedup": round(mean, 5),
            "replayed_forwards": [list(counts) for counts in sharp.forwards],
            "draft_step_ms": round(1000 * sharp.draft_s, 5),
        }

    def recheck(self, study: optuna.Study) -> float:
        """Measure the costs again, store them, and use the latest ones pooled.

        Returns how the price of verifying four tokens, in target steps, has changed since the first measurement.
        """
        options = CostOptions(self.options.gamma_max, _RECHECK_REPEATS, self.options.seed)
        self.costs.append(measure_costs(self.timer, self.texts, self.space, self.fingerprint, options))
        self.predictor.cost = pool_costs(self.costs)
        _store_costs(study, self.costs)
        return _relative_price(self.costs[-1]) / _relative_price(self.costs[0])

    def cannot_win(self) -> str | None:
        """Why no config is expected to beat plain decoding, with the numbers; None if one is.

        Predictions leave the loop's overhead out, so they are optimistic: what they rule out is ruled out.
        """
        best = self.pool.best
        speedup = math.exp(best.log_speedup)
        if speedup > 1.0:
            return None
        config = self.space.to_config(dict(best.params))
        cost, mask = self.predictor.cost, config.skip_mask
        draft = cost.draft_s(mask, threshold=config.draft_threshold > 0) / cost.verify_s[0]
        return (
            f"no config can win here: the best of {len(self.pool.candidates)} predicted masks, {mask} at gamma "
            f"{config.gamma}, reaches {speedup:.3f}x before overhead; its draft agrees with the target in "
            f"{self.predictor.agreement(mask):.2f} of cases at {draft:.2f} target steps a token, and verifying "
            f"{config.gamma} costs {cost.verify_s[config.gamma] / cost.verify_s[0]:.2f}"
        )


def open_outlook(
    study: optuna.Study,
    decoder: Decoder,
    space: SearchSpace,
    reference: Reference,
    fingerprint: Fingerprint,
    options: OutlookOptions,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Outlook:
    """The study's outlook: what is stored is read, the rest is measured and stored.

    Cost: a target forward over every text; before the first trial also the costs, two readings per sublayer and the
    pool, these two about 5 % each of the time that the trials may take.
    Raises: ValueError if the stored costs were measured on something else, or no text is long enough to draft on.
    """
    start = clock()
    cases = reference.cases
    longest = max(len(case.reference_ids) for case in cases)
    if longest < 3:
        raise ValueError(
            f"max_new_tokens: must leave room for a draft, three tokens, on at least one tuning prompt; the longest "
            f"continuation has {longest} (max_new_tokens {options.max_new_tokens})"
        )
    if options.gamma_max > longest - 2:
        raise ValueError(
            f"gamma_max: must be at most {longest - 2}, two less than the longest continuation ({longest} tokens), or "
            f"no round could draft so many, got {options.gamma_max}"
        )
    budget = max(_MIN_PREFLIGHT_S, _PREFLIGHT_SHARE * options.trials * options.trial_seconds)
    timer = decoder.timer(options.gamma_max)
    texts = texts_to_time(reference, options.gamma_max)
    costs = _costs(study, timer, texts, space, fingerprint, options)
    costs_s = clock() - start
    predictor = _predictor(study, decoder, reference, options, pool_costs(costs), space, budget, clock)
    candidates = Candidates(predictor, space)
    sensitivity = _sensitivity(study, predictor, space)
    pool_start = clock()
    pool = _pool(study, candidates, space, sensitivity, options, budget, clock)
    reading_s = (clock() - pool_start) / len(pool.candidates)
    num_readings = study.user_attrs.get(READINGS)
    if num_readings is None:
        allowed = max(_MIN_PROPOSAL_S, _PROPOSAL_SHARE * options.trial_seconds)
        num_readings = int(np.clip(allowed / reading_s if reading_s > 0 else _MAX_READINGS, 1, _MAX_READINGS))
        study.set_user_attr(READINGS, num_readings)
    seconds = {"costs": costs_s, "predictions": clock() - start - costs_s}
    return Outlook(
        space,
        predictor,
        candidates,
        pool,
        sensitivity,
        num_readings,
        timer,
        texts,
        costs,
        fingerprint,
        options,
        seconds,
    )


def describe_outlook(outlook: Outlook) -> list[str]:
    """A few lines for people."""
    cost, best = outlook.predictor.cost, outlook.pool.best
    config = outlook.space.to_config(dict(best.params))
    alone = cost.verify_s[0]
    far = min(4, len(cost.verify_s) - 1)
    order = outlook.sensitivity.sublayers
    worst = sorted(order, key=lambda one: one.leave_one_out)[:3]
    keys = "" if outlook.predictor.keys == "target" else " (the draft's own keys throughout: an approximation)"
    return [
        f"one target token {1000 * alone:.2f} ms, verifying {far} drafts {cost.verify_s[far] / alone:.2f} of that; "
        f"a draft token {cost.fixed_s / alone:.2f} + {cost.attention_s[0] / alone:.3f} an attention + "
        f"{cost.mlp_s[0] / alone:.3f} an MLP",
        f"hardest to do without: {', '.join(f'{one.name} (agreement {one.leave_one_out:.2f})' for one in worst)}",
        f"{len(outlook.pool.candidates)} masks predicted on {outlook.predictor.num_texts} texts{keys}; best "
        f"{math.exp(best.log_speedup):.2f}x: mask {config.skip_mask}, gamma {config.gamma}",
    ]


def outlook_facts(study: optuna.Study) -> dict[str, Any]:
    """`costs`, `sensitivity` and `pool` of summary.json, from what the study keeps."""
    attrs = study.user_attrs
    costs = [json.loads(one) for one in json.loads(attrs.get(COSTS, "[]"))]
    pool = json.loads(attrs.get(POOL, "[]"))
    return {
        "costs": {"first": costs[0], "last": costs[-1], "num_measured": len(costs)} if costs else None,
        "sensitivity": json.loads(attrs[SENSITIVITY]) if SENSITIVITY in attrs else None,
        "pool": {"num_predicted": len(pool), "best": pool[:3]},
        "cannot_win": attrs.get("cannot_win"),
    }


def _costs(
    study: optuna.Study,
    timer: Timer,
    texts: Sequence[Sequence[int]],
    space: SearchSpace,
    fingerprint: Fingerprint,
    options: OutlookOptions,
) -> list[CostModel]:
    stored = study.user_attrs.get(COSTS)
    if stored is not None:
        return [CostModel.from_json(one, fingerprint) for one in json.loads(stored)]
    costs = [measure_costs(timer, texts, space, fingerprint, CostOptions(options.gamma_max, seed=options.seed))]
    _store_costs(study, costs)
    return costs


def _store_costs(study: optuna.Study, costs: Sequence[CostModel]) -> None:
    study.set_user_attr(COSTS, json.dumps([one.to_json() for one in costs]))


def _predictor(
    study: optuna.Study,
    decoder: Decoder,
    reference: Reference,
    options: OutlookOptions,
    cost: CostModel,
    space: SearchSpace,
    budget: float,
    clock: Callable[[], float],
) -> Predictor:
    """On all texts, or on as many as can be read often enough; how many is decided once a study."""
    texts = [ForcedText(case.prompt_ids, case.reference_ids) for case in reference.cases]
    stored = study.user_attrs.get(TEXTS)
    forcing = decoder.teacher_forcing(texts[:stored])
    if stored is None:
        start = clock()
        forcing.read(SkipMask.none(space.num_layers))
        needed = (clock() - start) * 2 * len(space.bit_names)
        if needed > budget and len(texts) > _MIN_TEXTS:
            texts = texts[: max(_MIN_TEXTS, int(len(texts) * budget / needed))]
            forcing = decoder.teacher_forcing(texts)
        study.set_user_attr(TEXTS, len(texts))
    rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), options.max_new_tokens)
    return Predictor(forcing, rows, cost)


def _sensitivity(study: optuna.Study, predictor: Predictor, space: SearchSpace) -> Sensitivity:
    stored = study.user_attrs.get(SENSITIVITY)
    if stored is not None:
        return Sensitivity.from_json(stored)
    sensitivity = measure_sensitivity(predictor.agreement, space)
    study.set_user_attr(SENSITIVITY, sensitivity.to_json())
    return sensitivity


def _pool(
    study: optuna.Study,
    candidates: Candidates,
    space: SearchSpace,
    sensitivity: Sensitivity,
    options: OutlookOptions,
    budget: float,
    clock: Callable[[], float],
) -> Pool:
    stored = study.user_attrs.get(POOL)
    if stored is not None:
        return Pool.from_json(stored, candidates)
    pool = make_pool(candidates, space, sensitivity, seed=options.seed, seconds=budget, clock=clock)
    stored = pool.to_json(candidates)
    study.set_user_attr(POOL, stored)
    # As stored, rounded: what a resume will read must be what this run works with.
    return Pool.from_json(stored, candidates)


def texts_to_time(reference: Reference, gamma_max: int) -> tuple[tuple[int, ...], ...]:
    """A few texts of middling length, each up to about the middle of its continuation.

    With gamma_max + 1 tokens more they are no longer than what decoding makes of them, so the model has the positions.
    """
    room = gamma_max + 1
    cases = [case for case in reference.cases if len(case.reference_ids) > room]
    cases.sort(key=lambda case: len(case.prompt_ids) + len(case.reference_ids))
    middle = max(0, (len(cases) - _NUM_TIMED_TEXTS) // 2)
    return tuple(
        case.prompt_ids + case.reference_ids[: min(len(case.reference_ids) // 2, len(case.reference_ids) - room)]
        for case in cases[middle : middle + _NUM_TIMED_TEXTS]
    )


def _relative_price(cost: CostModel) -> float:
    return cost.verify_s[min(4, len(cost.verify_s) - 1)] / cost.verify_s[0]
