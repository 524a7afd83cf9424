"""What runs are worth against the truth: regrets, slow outcomes and wrong verdicts, and their means over models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerskip.analysis.intervals import student_half
from layerskip.config.decode_config import DecodeConfig
from search.rivals.registry import OURS
from studies.proving.runner import Case, RunResult
from studies.proving.truth import Optimum, speedup_of

WORTH_IT = 1.02
"""Speedup of the optimum from which "do not speculate" is wrong: less than 2 % is nobody's loss."""


@dataclass(frozen=True)
class Score:
    """One run, judged on the reporting prompts, without noise."""

    model: str
    costs: str
    strategy: str
    seed: int
    optimum: float
    """Speedup of the best decision, at least 1."""
    tuning_regret: float
    """Of the best decision by the tuning texts alone: what no search can be expected to go below."""
    regrets: dict[int, float]
    """After so many trials: by how much the leader's speedup falls short of the optimum, in per cent of it."""
    regret: float
    """The same of the config that is exported."""
    is_slower: bool
    """Whether that is slower than plain decoding."""
    refuses_wrongly: bool
    """Whether plain decoding is exported though the optimum is worth it."""
    speculates_wrongly: bool
    """Whether a config is exported though nothing beats plain decoding."""
    num_trials: int

    @classmethod
    def of(cls, case: Case, result: RunResult, optimum: Optimum) -> Score:
        """Cost: a replay a config."""

        def value(config: DecodeConfig) -> float:
            return speedup_of(case.table, case.prices, config, case.table.reporting)

        def regret(speedup: float) -> float:
            return round(100.0 * (1.0 - speedup / optimum.value), 4)

        exported = result.exported
        worth = value(exported)
        return cls(
            model=case.model,
            costs=case.costs.name,
            strategy=case.strategy,
            seed=case.seed,
            optimum=optimum.value,
            tuning_regret=regret(optimum.on_tuning),
            regrets={count: regret(value(config)) for count, config in result.leaders.items()},
            regret=regret(worth),
            is_slower=worth < 1.0,
            refuses_wrongly=not exported.speculates and optimum.speedup >= WORTH_IT,
            speculates_wrongly=exported.speculates and optimum.speedup <= 1.0,
            num_trials=result.num_trials,
        )


@dataclass(frozen=True)
class Mean:
    """Over models, each counting once, with Student's 95 % interval; None of a single model."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def over_models(cls, scores: Sequence[Score], of: Callable[[Score], float], against: Sequence[Score] = ()) -> Mean:
        """Of the models' own means over prices and seeds; less those of the scores that they are held against."""
        models = sorted({one.model for one in scores})

        def mean_of(model: str, some: Sequence[Score]) -> float:
            return float(np.mean([of(one) for one in some if one.model == model]))

        means = [mean_of(model, scores) - (mean_of(model, against) if against else 0.0) for model in models]
        mean = float(np.mean(means))
        if len(means) < 2:
            return cls(mean, None, None)
        half = student_half(means)
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.low is None else f"{self.mean:.2f} ({self.low:.2f}..{self.high:.2f})"


def summarise(scores: Sequence[Score]) -> dict[str, dict[str, Mean]]:
    """By strategy: the columns of the table; `behind` is what the exported config lacks of ours, model by model."""
    found = {}
    ours = [one for one in scores if one.strategy == OURS]
    for strategy in dict.fromkeys(one.strategy for one in scores):
        own = [one for one in scores if one.strategy == strategy]
        columns: dict[str, Mean] = {}
        for count in own[0].regrets:
            columns[f"regret_{count}"] = Mean.over_models(own, lambda one, count=count: one.regrets[count])  # type: ignore[misc]
        for name in ("regret", "is_slower", "refuses_wrongly", "speculates_wrongly"):
            scale = 1.0 if name == "regret" else 100.0
            columns[name] = Mean.over_models(own, lambda one, n=name, s=scale: s * float(getattr(one, n)))  # type: ignore[misc]
        if ours:
            columns["behind"] = Mean.over_models(own, lambda one: one.regret, against=ours)
        found[strategy] = columns
    return found


def table_of(summary: dict[str, dict[str, Mean]]) -> str:
    """Markdown, a row a strategy."""
    columns = list(next(iter(summary.values())))
    titles = [_title(name) for name in columns]
    rows = [f"| strategy | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(str(one) for one in means.values())} |" for name, means in summary.items()]
    return "\n".join(rows)


def _title(name: str) -> str:
    if name.startswith("regret_"):
        return f"regret after {name.removeprefix('regret_')}, %"
    return {
        "regret": "exported, %",
        "behind": "exported, behind ours, %",
        "is_slower": "slower than plain, % of runs",
        "refuses_wrongly": "wrongly refuses, %",
        "speculates_wrongly": "wrongly speculates, %",
    }[name]


def to_json(means: dict[str, dict[str, Mean]]) -> dict[str, Any]:
    """Plain values, to a ten thousandth."""

    def rounded(mean: Mean) -> dict[str, float | None]:
        return {name: None if one is None else round(one, 4) for name, one in vars(mean).items()}

    return {name: {column: rounded(one) for column, one in columns.items()} for name, columns in means.items()}


def by_costs(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """The scores at each machine's prices."""
    found: dict[str, list[Score]] = {}
    for one in scores:
        found.setdefault(one.costs, []).append(one)
    return found
