"""How good the predictions were: replayed against live counts, predicted against measured tokens/s."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from search.predict.replay import ReplayCheck, check_replay
from search.study.attributes import (
    FORWARDS,
    IS_TIE_BY_PROMPT,
    PREDICTED_RATIOS,
    PROMPT_STEPS,
    RATIOS,
    REPLAYED_FORWARDS,
)
from search.study.space import BITS, DRAFT_INT8
from search.study.trials import is_full, key_of

Floats = NDArray[np.float64]
_NUM_SIMULATED = 200
_MIN_FREEDOM = 20
"""Pairs measured again below which plain against plain says more about the clock."""
_MIN_CONFIGS = 8
"""Configs below which a rank correlation says nothing."""


@dataclass(frozen=True)
class UpperHalf:
    """Predicted against measured speed of the faster half of the configs: those among which a search has to choose.

    Each config once, all of its full trials pooled, and all configs on the same prompts. A correlation over all trials
    mixes in configs that cannot win, configs measured again, and prompts that are easy for every config.
    """

    num_configs: int
    """Whose measured speedup lies at or above the median of the distinct configs'."""
    num_prompts: int
    """That each of them decoded: those of the most common full trial."""
    spearman: float | None
    """Rank correlation; None where `reason` says why."""
    reason: str | None
    noise_spearman: float | None
    """What the clock's noise alone leaves of it; None where the noise is not known."""


@dataclass(frozen=True)
class PredictionCheck:
    """Predicted against measured tokens/s of trials, each on the prompts it was measured on."""

    num_trials: int
    median_abs_error: float
    """Of predicted / measured - 1."""
    spearman: float | None
    """Rank correlation; None below three trials or where all are equal."""
    bias: float
    """Geometric mean of predicted / measured; above 1 is optimistic."""
    noise_sigma: float | None
    """Standard deviation of the log of one pair's ratio that is the clock's alone; None where it is not known."""
    noise_freedom: int
    """Degrees of freedom it was learnt from, where configs met a prompt again; 0 = from plain against plain."""
    noise_median_abs_error: float | None
    """What that noise alone does to a prediction that is right."""
    noise_spearman: float | None
    """What that noise alone leaves of its rank correlation."""
    upper_half: UpperHalf


def replay_check_of(trials: Sequence[FrozenTrial], *, rounded: bool = False) -> ReplayCheck | None:
    """Counts over the prompts that each trial really decoded; None where no trial has both.

    An output that parted from the target's by a tie goes on as another text, of which replay says nothing.
    rounded: of trials whose draft computed with weights of 8 or 4 bits, and not of the others. What such a draft says
    depends on float32's last bits, which differ between one row and many: a bit decides to which step an activation is
    rounded, thirty layers make another draft of that, as good as the first. So replay is right on average there.
    """
    pairs = []
    for trial in trials:
        replayed, live = trial.user_attrs.get(REPLAYED_FORWARDS), trial.user_attrs.get(FORWARDS)
        if trial.state != TrialState.COMPLETE or not replayed or not live or _is_rounded(trial) is not rounded:
            continue
        parted = trial.user_attrs.get(IS_TIE_BY_PROMPT, [])
        whole = [i for i in range(min(len(replayed), len(live))) if not (i < len(parted) and parted[i])]
        if whole:
            pairs.append(tuple(np.array(one)[whole].sum(axis=0).tolist() for one in (replayed, live)))
    return check_replay(pairs)


def _is_rounded(trial: FrozenTrial) -> bool:
    return bool(trial.params.get(DRAFT_INT8, False) or trial.params.get(BITS))


def prediction_check_of(trials: Sequence[FrozenTrial], noise_sigma: float | None = None) -> PredictionCheck | None:
    """Predictions as they stood before each trial; None where no trial has one.

    noise_sigma: standard deviation of the log of a plain/plain ratio, see `Reference`; used where too few configs met a
    prompt again. (It is the smaller: drafting, verifying and plain steps do not suffer alike from a busy machine.)
    """
    from scipy import stats

    found = [(trial, pair) for trial in trials if (pair := predicted_and_measured(trial)) is not None]
    if not found:
        return None
    pairs = [pair for _, pair in found]
    predicted, measured = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    varied = len(pairs) >= 3 and np.ptp(predicted) > 0 and np.ptp(measured) > 0
    noise: tuple[float | None, float | None] = (None, None)
    repeated, freedom = noise_of_repeats([trial for trial, _ in found])
    sigma = noise_sigma if repeated is None else repeated
    if varied and sigma is not None:
        noise = _of_noise_alone(predicted, [len(trial.user_attrs[RATIOS]) for trial, _ in found], sigma)
    return PredictionCheck(
        num_trials=len(pairs),
        median_abs_error=float(np.median(np.abs(predicted / measured - 1.0))),
        spearman=float(stats.spearmanr(predicted, measured).statistic) if varied else None,
        bias=float(np.exp(np.log(predicted / measured).mean())),
        noise_sigma=sigma,
        noise_freedom=0 if repeated is None else freedom,
        noise_median_abs_error=noise[0],
        noise_spearman=noise[1],
        upper_half=upper_half_of(trials, sigma),
    )


def upper_half_of(trials: Sequence[FrozenTrial], noise_sigma: float | None = None) -> UpperHalf:
    """How predictions rank the configs that measured fast; trials that stopped early or decoded other prompts are out.

    noise_sigma: as in `PredictionCheck`.
    """
    from scipy import stats

    full = [(trial, pair) for trial in trials if is_full(trial) and (pair := predicted_and_measured(trial)) is not None]
    met = Counter(frozenset(trial.user_attrs[PROMPT_STEPS]) for trial, _ in full)
    shared = met.most_common(1)[0][0] if met else frozenset()
    by_config: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for trial, pair in full:
        if shared == frozenset(trial.user_attrs[PROMPT_STEPS]):
            by_config[key_of(trial.params)].append(pair)
    pooled = np.array([np.log(pairs).mean(axis=0) for pairs in by_config.values()]).reshape(-1, 2)
    half = _faster_half(pooled)
    spearman, reason, noise = None, None, None
    if len(half) < _MIN_CONFIGS:
        reason = f"{len(half)} distinct configs in this half, fewer than {_MIN_CONFIGS}"
    elif np.ptp(half, axis=0).min() == 0:
        reason = "all predicted alike, or all measured alike"
    else:
        spearman = float(stats.spearmanr(*half.T).statistic)
        if noise_sigma is not None:
            num_pairs = len(shared) * np.array([len(pairs) for pairs in by_config.values()])
            noise = _upper_half_of_noise_alone(pooled[:, 0], noise_sigma / np.sqrt(num_pairs))
    return UpperHalf(len(half), len(shared), spearman, reason, noise)


def _faster_half(pooled: Floats) -> Floats:
    """Rows of (predicted, measured) whose measured value is at or above the median."""
    return pooled[pooled[:, 1] >= np.median(pooled[:, 1])] if len(pooled) else pooled


def _upper_half_of_noise_alone(predicted: Floats, noise: Floats) -> float:
    """Rank correlation in the faster half where predicted logs are right and measured ones merely noisy."""
    from scipy import stats

    drawn = np.random.default_rng(0).normal(size=(_NUM_SIMULATED, len(predicted))) * noise
    halves = [_faster_half(np.column_stack((predicted, predicted + one))) for one in drawn]
    return float(np.median([stats.spearmanr(*half.T).statistic for half in halves]))


def noise_of_repeats(trials: Sequence[FrozenTrial]) -> tuple[float | None, int]:
    """(spread of the log ratios of a config on a prompt that it met before, degrees of freedom).

    The work is the same to the last token each time, so this is the clock's and the machine's. The spread is None
    where there are too few.
    """
    met: dict[Any, list[float]] = defaultdict(list)
    for trial in trials:
        attrs = trial.user_attrs if trial.state == TrialState.COMPLETE else {}
        key = key_of(trial.params)
        for step, ratio in zip(attrs.get(PROMPT_STEPS, ()), attrs.get(RATIOS, ()), strict=False):
            met[key, step].append(math.log(ratio))
    spread, freedom = spread_within(met.values())
    return (spread if freedom >= _MIN_FREEDOM else None), freedom


def spread_within(groups: Collection[Sequence[float]]) -> tuple[float, int]:
    """(standard deviation of values around the means of their groups, degrees of freedom)."""
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(len(values) * float(np.var(values)) for values in groups)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def _of_noise_alone(predicted: Floats, num_prompts: Sequence[int], noise_sigma: float) -> tuple[float, float]:
    """(median error, rank correlation) of predictions that are right and measurements that are merely noisy.

    Medians over simulated studies, from a fixed seed.
    """
    from scipy import stats

    noise = noise_sigma / np.sqrt(np.array(num_prompts))
    drawn = np.random.default_rng(0).normal(size=(_NUM_SIMULATED, len(predicted))) * noise
    ranks = [stats.spearmanr(predicted, predicted * np.exp(one)).statistic for one in drawn]
    return float(np.median(np.abs(np.exp(-drawn) - 1.0))), float(np.median(ranks))


def predicted_and_measured(trial: FrozenTrial) -> tuple[float, float] | None:
    """Speedups of one trial on the prompts it was measured on; None where it has no prediction or no measurement."""
    predicted, measured = trial.user_attrs.get(PREDICTED_RATIOS), trial.user_attrs.get(RATIOS)
    if trial.state != TrialState.COMPLETE or not predicted or not measured:
        return None
    logs = [[math.log(value) for value in one[: len(measured)]] for one in (predicted, measured)]
    return math.exp(math.fsum(logs[0]) / len(logs[0])), math.exp(math.fsum(logs[1]) / len(logs[1]))


def check_predictions(trials: Sequence[FrozenTrial], noise_sigma: float | None = None) -> dict[str, Any]:
    """`prediction`, `replay` and `replay_int8`, which is of 4 bits too, of summary.json; each None where there is
    nothing to compare."""
    prediction, replayed = prediction_check_of(trials, noise_sigma), replay_check_of(trials)
    rounded = replay_check_of(trials, rounded=True)
    return {
        "prediction": asdict(prediction) if prediction else None,
        "replay": asdict(replayed) if replayed else None,
        "replay_int8": asdict(rounded) if rounded else None,
    }


def describe_checks(checks: dict[str, Any]) -> list[str]:
    """One line each, for people."""
    lines = []
    if (replayed := checks["replay"]) is not None:
        lines.append(
            f"replayed counts against live ones, {replayed['num_settings']} trials: exact in "
            f"{100 * replayed['exact_share']:.0f} %, error median {100 * replayed['median_error']:.2f} %, "
            f"95th percentile {100 * replayed['p95_error']:.2f} %"
        )
    if (rounded := checks.get("replay_int8")) is not None:
        lines.append(
            f"the same of {rounded['num_settings']} trials with rounded weights, which can be right on average alone: "
            f"error median {100 * rounded['median_error']:.1f} %, 95th percentile {100 * rounded['p95_error']:.1f} %"
        )
    if (prediction := checks["prediction"]) is not None:
        lines.append(
            f"predicted tokens/s against measured, {prediction['num_trials']} trials: median error "
            f"{100 * prediction['median_abs_error']:.1f} %, {describe_ranks(prediction)}, "
            f"predicted / measured {prediction['bias']:.3f}"
        )
        if prediction["noise_spearman"] is not None:
            pairs = prediction["noise_freedom"]
            source = f"{pairs} pairs measured again" if pairs else "plain against plain"
            lines.append(
                f"the clock's noise alone ({100 * prediction['noise_sigma']:.1f} % a pair, {source}) "
                "would make a perfect prediction err by "
                f"{100 * prediction['noise_median_abs_error']:.1f} % and correlate {prediction['noise_spearman']:.3f}"
                f"{_among_the_faster(prediction['upper_half']['noise_spearman'])}"
            )
    return lines


def describe_ranks(prediction: Mapping[str, Any]) -> str:
    """Both rank correlations of `prediction` in summary.json in words."""
    overall, half = prediction["spearman"], prediction["upper_half"]
    words = f"rank correlation {'-' if overall is None else f'{overall:.3f}'}"
    if half["spearman"] is None:
        return f"{words} (faster half: {half['reason']})"
    return f"{words} ({half['spearman']:.3f} over the {half['num_configs']} distinct configs of the faster half)"


def _among_the_faster(spearman: float | None) -> str:
    return "" if spearman is None else f" ({spearman:.3f} in the faster half)"
