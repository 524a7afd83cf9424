"""Geometric means and intervals of paired ratios: those of `analysis.intervals`, and what a search asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from layerskip.analysis.intervals import CI_LEVEL, Interval, geometric_mean, ratio_interval

__all__ = ["CI_LEVEL", "Interval", "geometric_mean", "log_spread", "prompt_interval", "ratio_interval"]


def prompt_interval(ratios: Sequence[float]) -> Interval | None:
    """Where the ratio of one new prompt is expected: Student's prediction interval on the logs; None below two.

    `ratio_interval` is about the mean over prompts and shrinks as prompts are added; this one does not.
    """
    from scipy import stats

    if len(ratios) < 2:
        return None
    logs = np.log(np.asarray(ratios, dtype=float))
    count = len(logs)
    mean, spread = float(logs.mean()), float(logs.std(ddof=1))
    half = float(stats.t.ppf(0.5 + CI_LEVEL / 2, count - 1)) * spread * math.sqrt(1 + 1 / count)
    return Interval(math.exp(mean - half), math.exp(mean + half))


def log_spread(ratios: Sequence[float]) -> float:
    """Standard deviation of the log ratios around zero, that is, of an A/A run. 0 for an empty list."""
    if not ratios:
        return 0.0
    return math.sqrt(math.fsum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))
