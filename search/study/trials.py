"""Trials: what their attributes say, which of them count, and a config's parameters as something to look up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from search.study.attributes import (
    EXPECTED_GAIN,
    FAILURE,
    FORECAST_RATIOS,
    FORECAST_SPEEDUP,
    LOSSLESS,
    RATIOS,
    STOPPED_EARLY,
    TOKENS_PER_S,
)

INTERRUPTED, WORKER_DIED, WITHDRAWN = "interrupted", "worker died", "withdrawn: the total is reached without it"
"""Reasons that say nothing about the config."""
Key = tuple[tuple[str, Any], ...]


def key_of(params: Mapping[str, Any]) -> Key:
    """A config's parameters as something to look up."""
    return tuple(_pair(name, params[name]) for name in sorted(params))


@lru_cache(maxsize=1 << 14, typed=True)
def _pair(name: str, value: Any) -> tuple[str, Any]:
    """Keys of thousands of configs share their pairs: a search keeps one for every config that it ever predicted."""
    return name, value


def counted(trials: Iterable[FrozenTrial]) -> int:
    """Trials that count towards the total: measured, refused or failed for a reason of their own.

    Interrupted and killed ones do not; their configs are queued again.
    """
    return sum(trial.state.is_finished() and not was_interrupted(trial) for trial in trials)


def expected_gains(trials: Iterable[FrozenTrial], latest: int) -> list[float]:
    """Of the `latest` last trials that keep one, oldest first."""
    found = [one.user_attrs[EXPECTED_GAIN] for one in trials if EXPECTED_GAIN in one.user_attrs]
    return [float(one) for one in found[-latest:]]


def was_interrupted(trial: FrozenTrial) -> bool:
    """Stopped by a signal, its process died, or it was one too many: FAIL without a reason of its own."""
    reasons = (INTERRUPTED, WORKER_DIED, WITHDRAWN)
    return trial.state == TrialState.FAIL and trial.user_attrs.get(FAILURE, INTERRUPTED) in reasons


def tokens_per_s_of(trial: FrozenTrial) -> float:
    """What a measured trial decoded at."""
    return float(trial.user_attrs.get(TOKENS_PER_S, trial.value or 0.0))


def is_full(trial: FrozenTrial) -> bool:
    """Measured on all prompts of a trial, losslessly: one that may lead."""
    return is_measured(trial) and trial.user_attrs.get(STOPPED_EARLY) is False


def interactions_of(attributes: Mapping[str, Any]) -> list[float] | None:
    """Forecast interactions of a trial's config with each of its prompts; None where the trial keeps no forecast.

    An interaction is the forecast log speedup on the prompt less that on the average text.
    """
    ratios, average = attributes.get(FORECAST_RATIOS), attributes.get(FORECAST_SPEEDUP)
    return [math.log(ratio / average) for ratio in ratios] if ratios and average else None


def is_measured(trial: FrozenTrial) -> bool:
    """It has ratios, and its outputs were the target's; on all of its prompts or not."""
    attrs = trial.user_attrs
    return trial.state == TrialState.COMPLETE and attrs.get(LOSSLESS) is True and bool(attrs.get(RATIOS))


def trials_by_state(trials: list[FrozenTrial]) -> dict[str, int]:
    """Counts by state, in words of this package."""
    words = dict.fromkeys(("measured", "stopped_early", "not_lossless", "failed", "interrupted"), 0)
    for trial in trials:
        if trial.state == TrialState.COMPLETE:
            words["stopped_early" if trial.user_attrs.get(STOPPED_EARLY) else "measured"] += 1
        elif trial.state == TrialState.PRUNED:
            words["not_lossless"] += 1
        elif trial.state == TrialState.FAIL:
            words["interrupted" if was_interrupted(trial) else "failed"] += 1
    return words
