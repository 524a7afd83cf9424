"""Geometric means and intervals of paired ratios: those of `analysis.intervals`, and what a search asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from layerskip.analysis.intervals import CI_LEVEL, Interval, geometric_mean, ratio_interval, student_half

__all__ = ["CI_LEVEL", "Interval", "geometric_mean", "log_spread", "prompt_interval", "ratio_interval", "student_half"]


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
