"""Correction: what measured trials teach about the predictions of configs like them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from scipy.linalg import cho_factor, cho_solve

from search.space import (
    DRAFT_THRESHOLD,
    FACTOR,
    GAMMA,
    LOOKUP_GAMMA,
    SHARE_PREFIX,
    TARGET_THRESHOLD,
    SearchSpace,
)

Floats = NDArray[np.float64]
_COMMON = 0.1
"""Standard deviation, in log speed, of the error that all predictions share: the loop's overhead, a drifted cost."""
_OWN = 0.03
"""Of the error that only configs alike share."""
_REACH = 0.15
"""Share of the parameters that must differ for the likeness to fall to 1/e."""
_MOST_AT_ONCE = 1 << 16
"""Configs x trials looked at together: half a MiB an array, however many trials there are. With all configs at once the
arrays grew with the trials, and the heap with them."""
_NOISE = 0.02
"""Of what no config can do anything about, per trial, besides the clock's noise."""


class Correction:
    """Gaussian process on log(measured / predicted) of trials, over bits, gamma and thresholds.

    `field` names the attribute with the predictions to correct.

    Cost: cubic in the trials, a millisecond for a hundred of them.
    """

    def __init__(
        self, trials: Sequence[FrozenTrial], space: SearchSpace, noise_sigma: float, field: str = "forecast_ratios"
    ) -> None:
        self._space = space
        rows = [(trial.params, *residual) for trial in trials if (residual := residual_of(trial, field)) is not None]
        self.num_trials = len(rows)
        if not rows:
            return
        self._points = self._features([row[0] for row in rows])
        noise = np.array([_NOISE**2 + noise_sigma**2 / row[2] for row in rows])
        factor = cho_factor(self._kernel(self._points, self._points) + np.diag(noise), lower=True)
        # The inverse itself, because it is small and many more points than trials are asked for.
        self._inverse = cho_solve(factor, np.eye(len(rows)))
        self._weights = self._inverse @ np.array([row[1] for row in rows])

    def of(self, params: Sequence[Mapping[str, Any]]) -> tuple[Floats, Floats]:
        """Mean and standard deviation, (N,) each, of log(measured / predicted) of these configs."""
        if self.num_trials == 0 or not params:
            return np.zeros(len(params)), np.full(len(params), math.hypot(_COMMON, _OWN))
        mean, explained = np.empty(len(params)), np.empty(len(params))
        step = max(1, _MOST_AT_ONCE // self.num_trials)
        for start in range(0, len(params), step):
            part = slice(start, start + step)
            across = self._kernel(self._features(params[part]), self._points)
            mean[part] = across @ self._weights
            explained[part] = ((across @ self._inverse) * across).sum(axis=1)
        return mean, np.sqrt(np.maximum(_COMMON**2 + _OWN**2 - explained, 0.0))

    def _features(self, params: Sequence[Mapping[str, Any]]) -> Floats:
        bits = self._space.bit_names
        rows = [[*(float(one.get(name, False)) for name in bits), *self._others(one)] for one in params]
        return np.array(rows)

    def _others(self, params: Mapping[str, Any]) -> tuple[float, ...]:
        """What a drafter has not is 0."""
        found = [params.get(GAMMA, 0) / self._space.gamma_max]
        found += [params.get(name, 0.0) for name in (DRAFT_THRESHOLD, TARGET_THRESHOLD)]
        if self._space.share_prefix:
            found.append(float(params.get(SHARE_PREFIX, False)))
        if self._space.lookup_methods:
            found += [float(GAMMA in params), float(LOOKUP_GAMMA in params), float(FACTOR in params)]
            found.append(params.get(LOOKUP_GAMMA, 0) / self._space.lookup_gamma_max)
        return tuple(found)

    def _kernel(self, one: Floats, other: Floats) -> Floats:
        """Bits are 0 or 1, so their squared distance is the number that differ."""
        squares = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
        likeness = np.exp(-np.maximum(squares, 0.0) / max(1.0, _REACH * one.shape[1]))
        kernel: Floats = _COMMON**2 + _OWN**2 * likeness
        return kernel


def residual_of(trial: FrozenTrial, field: str = "forecast_ratios") -> tuple[float, int] | None:
    """(log(measured / predicted) over a trial's prompts, number of prompts); None without either.

    `field`: the attribute that holds the predictions, prompt by prompt.
    """
    ratios, forecast = trial.user_attrs.get("ratios"), trial.user_attrs.get(field)
    if trial.state != TrialState.COMPLETE or not ratios or not forecast:
        return None
    logs = [math.log(ratio / expected) for ratio, expected in zip(ratios, forecast, strict=False)]
    return math.fsum(logs) / len(logs), len(logs)
