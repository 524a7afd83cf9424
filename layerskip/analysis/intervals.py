"""Geometric means of positive numbers (rates, paired ratios) and their intervals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

CI_LEVEL = 0.95
MIN_BOOTSTRAP = 24
"""Below this many prompts the bootstrap's intervals are too narrow, so Student's t on the log ratios is used."""


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval of a geometric mean of ratios."""

    low: float
    high: float


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log)). Raises: ValueError if empty or not all positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"geometric mean needs positive values, got {list(values)[:8]}")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def ratio_interval(ratios: Sequence[float], *, seed: int) -> Interval | None:
    """Interval of the geometric mean over prompts; None for a single prompt, which tells nothing of others.

    From 24 prompts on: BCa bootstrap of the mean log ratio over prompts (10,000 resamples, percentile where BCa is
    undefined), below: Student's t. All ratios equal: that value at both ends.
    """
    from scipy import stats

    logs = np.log(np.asarray(ratios, dtype=float))
    if len(logs) < 2:
        return None
    mean = float(logs.mean())
    if float(np.ptp(logs)) < 1e-12:
        return Interval(math.exp(mean), math.exp(mean))
    if len(logs) < MIN_BOOTSTRAP:
        half = student_half(logs)
        return Interval(math.exp(mean - half), math.exp(mean + half))
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a degenerate BCa warns and returns nan, which is handled below
            result = stats.bootstrap(
                (logs,),
                np.mean,
                n_resamples=10_000,
                confidence_level=CI_LEVEL,
                method=method,
                rng=np.random.default_rng(seed),
            )
        low, high = (float(end) for end in result.confidence_interval)
        if math.isfinite(low) and math.isfinite(high):
            return Interval(math.exp(low), math.exp(high))
    return None


def student_half(values: ArrayLike, *, one_more: bool = False) -> float:
    """How far a two-sided interval of Student's t reaches from the mean of at least two values: where the mean of all
    such values is expected, or with `one_more` a single new one."""
    numbers = np.asarray(values, dtype=float)
    count = len(numbers)
    reach = _student(count - 1) * float(numbers.std(ddof=1))
    return reach * math.sqrt(1 + 1 / count) if one_more else reach / math.sqrt(count)


@lru_cache(maxsize=MIN_BOOTSTRAP)
def _student(freedom: int) -> float:
    """How many standard errors a two-sided interval of Student's t reaches."""
    from scipy import stats

    return float(stats.t.ppf(0.5 + CI_LEVEL / 2, freedom))


def prompt_interval(ratios: Sequence[float]) -> Interval | None:
    """Where the ratio of one new prompt is expected: Student's prediction interval on the logs; None below two.

    `ratio_interval` is about the mean over prompts and shrinks as prompts are added; this one does not.
    """
    if len(ratios) < 2:
        return None
    logs = np.log(np.asarray(ratios, dtype=float))
    mean, half = float(logs.mean()), student_half(logs, one_more=True)
    return Interval(math.exp(mean - half), math.exp(mean + half))


def log_spread(ratios: Sequence[float]) -> float:
    """Standard deviation of the log ratios around zero, that is, of an A/A run. 0 for an empty list."""
    if not ratios:
        return 0.0
    return math.sqrt(math.fsum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))
