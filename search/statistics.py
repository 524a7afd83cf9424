"""Geometric means and intervals of paired ratios."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CI_LEVEL = 0.95
MIN_BOOTSTRAP = 8
"""Below this many prompts the bootstrap's intervals are far too narrow, so Student's t on the log ratios is used."""


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


def ratio_interval(ratios: Sequence[float], *, seed: int, level: float = CI_LEVEL) -> Interval | None:
    """Interval of the geometric mean over prompts; None for a single prompt, which tells nothing of others.

    From 8 prompts on: BCa bootstrap of the mean log ratio over prompts (10,000 resamples, percentile where BCa is
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
        half = float(stats.t.ppf(0.5 + level / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
        return Interval(math.exp(mean - half), math.exp(mean + half))
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a degenerate BCa warns and returns nan, which is handled below
            result = stats.bootstrap(
                (logs,),
                np.mean,
                n_resamples=10_000,
                confidence_level=level,
                method=method,
                rng=np.random.default_rng(seed),
            )
        low, high = (float(end) for end in result.confidence_interval)
        if math.isfinite(low) and math.isfinite(high):
            return Interval(math.exp(low), math.exp(high))
    return None


def prompt_interval(ratios: Sequence[float], *, level: float = CI_LEVEL) -> Interval | None:
    """Where the ratio of one new prompt is expected: Student's prediction interval on the logs; None below two.

    `ratio_interval` is about the mean over prompts and shrinks as prompts are added; this one does not.
    """
    from scipy import stats

    if len(ratios) < 2:
        return None
    logs = np.log(np.asarray(ratios, dtype=float))
    count = len(logs)
    mean, spread = float(logs.mean()), float(logs.std(ddof=1))
    half = float(stats.t.ppf(0.5 + level / 2, count - 1)) * spread * math.sqrt(1 + 1 / count)
    return Interval(math.exp(mean - half), math.exp(mean + half))


def log_spread(ratios: Sequence[float]) -> float:
    """Standard deviation of the log ratios around zero, that is, of an A/A run. 0 for an empty list."""
    if not ratios:
        return 0.0
    return math.sqrt(math.fsum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))
