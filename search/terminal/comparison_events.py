"""Events of a comparison: its runs take turns, then their leaders are confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from search.study.leaderboard import Entry
from search.terminal.event import Event, Line
from search.terminal.text import duration


@dataclass(frozen=True)
class ComparisonBegins(Event):
    """Runs of so many trials each follow; `num_done` of all their trials are in the journal."""

    name = "comparison"
    strategies: Sequence[str]
    num_seeds: int
    num_done: int
    num_trials: int
    """Of all runs together."""

    def lines(self) -> list[Line]:
        runs = f"{len(self.strategies)} strategies x {self.num_seeds} seeds"
        return [Line(f"{runs}, {self.num_done} of {self.num_trials} trials done", "runs")]


@dataclass(frozen=True)
class RunAdvanced(Event):
    """A run has had its turn; `leader` is its best config so far."""

    name = "run"
    strategy: str
    seed: int
    num_run_trials: int
    """Trials of this run."""
    num_done: int
    num_trials: int
    """Of all runs together."""
    leader: Entry | None
    eta_s: float

    def lines(self) -> list[Line]:
        best = f"best {self.leader.speedup:.2f}x" if self.leader else "none yet"
        run = f"{self.strategy}, seed {self.seed}: {self.num_run_trials} trials, {best}"
        return [Line(f"{self.num_done}/{self.num_trials}  {run}, eta {duration(self.eta_s)}", "run")]

    def fields(self) -> dict[str, Any]:
        facts = super().fields()
        leader = facts.pop("leader")
        best = (leader.speedup, leader.lower) if leader else (None, None)
        return facts | dict(zip(("best_speedup", "best_speedup_lower"), best, strict=True))


@dataclass(frozen=True)
class PicksAdvanced(Event):
    """Every leader was measured on one more held-out prompt."""

    name = "picks"
    num_done: int
    num_turns: int
    """Held-out prompts times passes."""
    eta_s: float

    def lines(self) -> list[Line]:
        return [Line(f"{self.num_done}/{self.num_turns} held-out prompts, eta {duration(self.eta_s)}", "confirm")]
