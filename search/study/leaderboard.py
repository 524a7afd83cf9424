"""Leaderboard: trials of one config pooled, prompts' difficulty taken out, ranked by a lower bound."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial

from layerskip.config.decode_config import DecodeConfig
from search.study.attributes import FORECAST_SPEEDUP, PROMPT_STEPS, RATIOS
from search.study.space import DRAFTER, SearchSpace
from search.study.trials import Key, interactions_of, is_full, is_measured, key_of

MIN_SIGMA = 0.005
"""Nobody's clock is better than half a percent per pair; guards against runs that were quiet by chance."""
PRIOR_SIGMA = 0.1
"""Spread of a log ratio assumed until it is measured: most of it is that configs suit some prompts better."""
_ONE_SIDED_95 = 1.645
_STOP_Z = 2.0
_MIN_FREEDOM = 8
_SWEEPS = 30
_SETTLED = 1e-9
"""A sweep that moves no prompt's effect by more is the last."""
_INTERACTION_PRIOR = 0.03
"""Prior strength of an interaction weight of 1, as a sum of squared interactions: a handful of trials outweighs it."""
_PRIOR_FORECAST_SIGMA = 0.02
"""Prior spread of measured log speedups around forecast ones, a bias common to all apart."""
_FORECAST_PRIOR = 8
"""Prior strength of that spread, in configs."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Entry:
    """One config with all its trials pooled."""

    config: DecodeConfig
    params: Mapping[str, Any]
    trials: tuple[int, ...]
    """Numbers of its full trials, or of all where each was stopped early; first measured first."""
    num_pairs: int
    speedup: float
    """Estimate for the average prompt, shrunk towards the forecast, see `make_standings`."""
    lower: float
    """One-sided 95 % lower bound of `speedup`."""
    stopped_early: bool = False
    """Whether every trial of it was."""


@dataclass(frozen=True)
class Standings:
    """Every config that has a full trial, best lower bound first, and what was learnt about the prompts."""

    entries: tuple[Entry, ...]
    """They alone can lead."""
    effects: Mapping[int, float]
    """Per prompt (its place in the reference): how far log ratios on it lie above the average first-trial prompt's."""
    sigma: float
    """Spread of one log ratio around config + prompt: clock noise, and interactions not forecast."""
    interaction_weight: float = 1.0
    """Share of forecast interactions that is taken out of log ratios; 0 where some trial keeps no forecast. With it
    estimates are for the average of all prompts, else for that of a first trial."""
    stopped: tuple[Entry, ...] = ()
    """Of each drafter without an entry the config with the best lower bound, estimated from the prompts that it saw
    before its trials were stopped early."""

    @property
    def leader(self) -> Entry | None:
        """The config with the best lower bound."""
        return self.entries[0] if self.entries else None

    def is_hopeless(self, estimate: float, num_pairs: int) -> bool:
        """Whether a config that stands at `estimate` after so many pairs lies two standard errors below the leader."""
        if self.leader is None:
            return False
        error = self.sigma * math.sqrt(1 / num_pairs + 1 / self.leader.num_pairs)
        return math.log(estimate / self.leader.speedup) < -_STOP_Z * error

    def num_full_trials(self, params: Mapping[str, Any]) -> int:
        """How often this config has been measured in full."""
        return next((len(entry.trials) for entry in self.entries if entry.params == params), 0)

    def standardised(
        self, steps: Sequence[int], ratios: Sequence[float], interactions: Sequence[float] | None = None
    ) -> float:
        """Speedup on the average prompt, from ratios on any prompts: easy prompts count for less.

        interactions: forecast, with each of these prompts, see `interactions_of`.
        """
        forecast = [0.0] * len(ratios) if interactions is None else interactions
        logs = [
            math.log(ratio) - self.effects.get(step, 0.0) - self.interaction_weight * one
            for step, ratio, one in zip(steps, ratios, forecast, strict=True)
        ]
        return math.exp(math.fsum(logs) / len(logs))


def make_standings(trials: Iterable[FrozenTrial], space: SearchSpace, noise_sigma: float, num_first: int) -> Standings:
    """Pool the trials of each config and rank the configs.

    Fits log ratio = config + prompt + weight x interaction + residual by alternating means, prompts shrunk towards zero
    with a prior strength of one observation, the first `num_first` prompts averaging zero. So a config measured again
    on other prompts, or stopped early, is compared as if on the same ones. Interactions are the forecast ones, their
    weight the share in which ratios have followed them: a config that was lucky with its prompts is not taken for a
    fast one. The lower bound is config - 1.645 sigma / sqrt(pairs), sigma being the residuals' spread: one lucky trial
    ranks below a slightly slower config measured often.
    A forecast was made on more text than trials decode. So where every config has one, its mean is shrunk towards it by
    empirical Bayes, see `_shrink_to_forecasts`, and the bound is that of the result.
    Formulas: `search/predict/README.md`, "Leaderboard".
    Cost: well under a millisecond per hundred trials; nothing for the same ones as the last time.
    """
    return _standings_of(_Trials(filter(is_measured, trials)), space, noise_sigma, num_first)


class _Trials(tuple[FrozenTrial, ...]):
    """Finished trials, which do not change, told apart by identity: each lists all of its attributes to compare."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Trials) and len(self) == len(other) and all(map(operator.is_, self, other))


@lru_cache(maxsize=1)
def _standings_of(trials: _Trials, space: SearchSpace, noise_sigma: float, num_first: int) -> Standings:
    groups: dict[Key, list[FrozenTrial]] = defaultdict(list)
    for trial in trials:
        if space.holds(trial.params):
            groups[key_of(trial.params)].append(trial)
    if not groups:
        return Standings((), {}, max(noise_sigma, PRIOR_SIGMA))
    fit = _Fit(list(groups.values()), num_first)
    sigma = max(noise_sigma, PRIOR_SIGMA) if fit.sigma is None else max(fit.sigma, MIN_SIGMA)
    may_lead = np.array([any(is_full(trial) for trial in group) for group in groups.values()])
    means, errors = _shrink_to_forecasts(fit, [_forecast_of(group) for group in groups.values()], sigma, may_lead)
    keys, members, bounds = list(groups), list(groups.values()), means - _ONE_SIDED_95 * errors

    def entry_of(i: int) -> Entry:
        params, mean, lower = dict(keys[i]), float(means[i]), float(bounds[i])
        trials = tuple(sorted(trial.number for trial in members[i] if is_full(trial) or not may_lead[i]))
        pairs, bounded = int(fit.pairs[i]), (math.exp(mean), math.exp(lower))
        return Entry(_config_of(space, keys[i]), params, trials, pairs, *bounded, stopped_early=not may_lead[i])

    entries = [entry_of(int(i)) for i in np.flatnonzero(may_lead)]
    entries.sort(key=lambda entry: (-entry.lower, entry.trials))
    best_first = [int(i) for i in np.argsort(-bounds, kind="stable")]
    stopped = _first_by_drafter(keys, [i for i in best_first if not may_lead[i]])
    leading = {one.config.way for one in entries}
    others = [entry_of(i) for drafter, i in stopped.items() if drafter not in leading]
    return Standings(
        tuple(entries), dict(enumerate(fit.prompts.tolist())), sigma, fit.interaction_weight, tuple(others)
    )


@lru_cache(maxsize=1 << 11)
def _config_of(space: SearchSpace, key: Key) -> DecodeConfig:
    """Kept, because every trial makes the standings of all before it."""
    return space.to_config(dict(key))


def _first_by_drafter(keys: Sequence[Key], places: Iterable[int]) -> dict[str, int]:
    """The first of these places for each drafter. No config is made: that costs more than the fit of many trials."""
    found: dict[str, int] = {}
    for i in places:
        found.setdefault(dict(keys[i]).get(DRAFTER, "layer_skip"), i)
    return found


def _forecast_of(trials: Sequence[FrozenTrial]) -> float | None:
    """Log speedup forecast on all texts, on average over a config's trials; None where none keeps one."""
    logs = [math.log(one) for trial in trials if (one := trial.user_attrs.get(FORECAST_SPEEDUP))]
    return math.fsum(logs) / len(logs) if logs else None


def _shrink_to_forecasts(
    fit: _Fit, forecasts: Sequence[float | None], sigma: float, may_lead: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """(means, standard errors) of the configs, shrunk towards their forecasts; as measured where one has none.

    The forecasts' bias and spread are those of configs that may lead: how far off they are for hopeless ones says
    little about leaders.
    """
    variances = sigma**2 / fit.pairs
    given = [one for one in forecasts if one is not None]
    if len(given) < len(forecasts) or fit.interaction_weight == 0.0:
        return fit.configs, np.sqrt(variances)
    residuals = fit.configs - np.array(given)
    chosen = may_lead if may_lead.any() else np.ones_like(may_lead)
    bias = float(np.median(residuals[chosen]))  # not the mean: one config measured often and far off is no common bias
    excess = float(((residuals[chosen] - bias) ** 2 - variances[chosen]).sum())
    total = excess + _FORECAST_PRIOR * _PRIOR_FORECAST_SIGMA**2
    between = max(total / (int(chosen.sum()) + _FORECAST_PRIOR), MIN_SIGMA**2)
    gain = between / (between + variances)
    return np.array(given) + bias + gain * (residuals - bias), np.sqrt(gain * variances)


@dataclass(frozen=True)
class _Observed:
    """What one trial saw, pair by pair."""

    steps: npt.NDArray[np.int64]
    logs: Floats
    interactions: Floats | None
    is_full: bool


@lru_cache(maxsize=1 << 10)
def _observed(trial: _Trials) -> _Observed:
    """Of one finished trial, which every later fit takes in again."""
    [one] = trial
    found, logs = interactions_of(one.user_attrs), np.array([math.log(ratio) for ratio in one.user_attrs[RATIOS]])
    # A trial that stopped early was forecast on more prompts than it saw.
    interactions = None if found is None else np.array(found[: len(logs)])
    return _Observed(np.array(one.user_attrs[PROMPT_STEPS]), logs, interactions, is_full(one))


class _Fit:
    """The fit: arrays `configs` and `prompts` of effects, `pairs` per config, `interaction_weight`, `sigma` or None."""

    def __init__(self, groups: Sequence[Sequence[FrozenTrial]], num_first: int) -> None:
        seen_by = [(i, _observed(_Trials((trial,)))) for i, group in enumerate(groups) for trial in group]
        all_forecast = all(one.interactions is not None for _, one in seen_by)
        config = np.repeat([i for i, _ in seen_by], [len(one.logs) for _, one in seen_by])
        prompt, log = (np.concatenate([getattr(one, name) for _, one in seen_by]) for name in ("steps", "logs"))
        full = np.concatenate([np.full(len(one.logs), one.is_full) for _, one in seen_by])
        interaction = np.zeros(len(log))
        if all_forecast:
            interaction = np.concatenate([one.interactions for _, one in seen_by])
        self.pairs = np.bincount(config)
        self.interaction_weight: float = 1.0 if all_forecast else 0.0
        centred = interaction - (np.bincount(config, interaction) / self.pairs)[config]
        total = float(centred @ centred) + _INTERACTION_PRIOR
        seen = np.bincount(prompt)
        strength = seen + 1
        self.prompts = np.zeros(len(seen))
        first, unseen = np.flatnonzero(seen[:num_first]), seen == 0
        adjusted = log - self.interaction_weight * interaction
        for _ in range(_SWEEPS):
            before = self.prompts
            self.configs = np.bincount(config, adjusted - before[prompt]) / self.pairs
            self.prompts = np.bincount(prompt, adjusted - self.configs[config]) / strength
            if len(first):
                self.prompts -= np.add.reduce(self.prompts[first]) / len(first)
            self.prompts[unseen] = 0.0
            if all_forecast:
                followed = float(centred @ (log - self.prompts[prompt])) + _INTERACTION_PRIOR
                self.interaction_weight = min(max(followed / total, 0.0), 1.0)
                adjusted = log - self.interaction_weight * interaction
            if np.abs(self.prompts - before).max() < _SETTLED:
                break
        self.configs = np.bincount(config, adjusted - self.prompts[prompt]) / self.pairs
        residuals = (adjusted - self.configs[config] - self.prompts[prompt])[full]
        num_effects = len(np.unique(config[full])) + len(np.unique(prompt[full])) - 1
        freedom = len(residuals) - num_effects if len(residuals) else 0
        self.sigma = math.sqrt(float(residuals @ residuals) / freedom) if freedom >= _MIN_FREEDOM else None
