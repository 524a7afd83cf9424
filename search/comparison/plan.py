"""What a comparison runs, as one validated value, and how long that will take."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass

from search.budget.work import Work
from search.measure.subject import Subject
from search.preflight import pace_of
from search.rivals import STRATEGIES
from search.study.spec import StudySpec
from search.terminal.text import duration

BLOCK = 3
"""Trials of one run before the next run has its turn: short, so that drift of the machine hits all runs alike."""


@dataclass(frozen=True)
class ComparisonPlan:
    """Strategies x seeds = runs. Raises: ValueError naming the flag, the rule and the value got."""

    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: int
    """Per run."""
    checkpoints: tuple[int, ...]
    """Numbers of trials after which each run's leader is confirmed; ascending."""
    confirm_repeats: int

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError(f"--strategies: must name at least one of {', '.join(STRATEGIES)}, got none")
        for name in self.strategies:
            if name not in STRATEGIES:
                close = difflib.get_close_matches(name, STRATEGIES, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"--strategies: must be among {', '.join(STRATEGIES)}, got {name!r}{hint}")
        if len(set(self.strategies)) < len(self.strategies):
            raise ValueError(f"--strategies: must name each strategy once, got {','.join(self.strategies)}")
        if len(self.seeds) < 2:
            raise ValueError(f"--seeds: must be at least 2, or there is no interval, got {len(self.seeds)}")
        if self.trials < 1:
            raise ValueError(f"--trials: must be at least 1, got {self.trials}")
        if not self.checkpoints or min(self.checkpoints) < 1 or max(self.checkpoints) > self.trials:
            got = ",".join(map(str, self.checkpoints)) or "none"
            raise ValueError(f"--checkpoints: must be in 1..{self.trials}, the number of trials, got {got}")
        if list(self.checkpoints) != sorted(set(self.checkpoints)):
            raise ValueError(f"--checkpoints: must ascend, got {','.join(map(str, self.checkpoints))}")
        if self.confirm_repeats < 1:
            raise ValueError(f"--confirm-repeats: must be at least 1, got {self.confirm_repeats}")

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """(strategy, seed), one seed of every strategy before the next seed."""
        return tuple((name, seed) for seed in self.seeds for name in self.strategies)

    def turns(self) -> list[tuple[str, int, int]]:
        """(strategy, seed, trials to have then): blocks of three, each round of them starting with another run."""
        runs, turns = self.runs, []
        for number, start in enumerate(range(0, self.trials, BLOCK)):
            shift = number % len(runs)
            for name, seed in (*runs[shift:], *runs[:shift]):
                turns.append((name, seed, min(start + BLOCK, self.trials)))
        return turns


def estimate(
    plan: ComparisonPlan, subject: Subject, spec: StudySpec, clock: Callable[[], float] = time.perf_counter
) -> str:
    """How long the comparison will take at most, from a few timed steps. Cost: see `measure_pace`."""
    pace = pace_of(subject, spec, clock)
    pair_s = pace.decoding_s(spec.max_new_tokens, 2)
    per_trial = Work.of(spec, subject).amounts(pace).prompts_per_trial
    num_trials = len(plan.runs) * plan.trials
    num_picks = len(plan.runs) * len(plan.checkpoints) + 1  # the one is n-grams
    num_held_out = min(len(subject.held_out), spec.num_confirm_prompts)
    confirm_s = num_picks * num_held_out * plan.confirm_repeats * 2 * pace.decoding_s(spec.max_new_tokens)
    return (
        f"{len(plan.strategies)} strategies x {len(plan.seeds)} seeds x {plan.trials} trials of up to {per_trial} "
        f"prompts: at most about {duration(num_trials * per_trial * pair_s)} of measuring and what the strategies "
        f"think; then up to {num_picks} picks, n-grams among them, on {num_held_out} held-out prompts x "
        f"{plan.confirm_repeats}: at most about {duration(confirm_s)}"
    )
