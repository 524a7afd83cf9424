"""ComparisonView: how far a comparison is, a row per strategy."""

from __future__ import annotations

from statistics import geometric_mean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from search.terminal.comparison_events import ComparisonBegins, PicksAdvanced, RunAdvanced
from search.terminal.event import Event, Note
from search.terminal.text import duration
from search.terminal.view import bar_row, labelled_rows


class ComparisonView:
    """A rich renderable that is told every event with `take` and shows what they add up to."""

    def __init__(self) -> None:
        self._strategies: tuple[str, ...] = ()
        self._num_seeds = 0
        self._stage, self._unit = "runs", "trials"
        self._done = self._total = 0
        self._eta_s: float | None = None
        self._latest: RunAdvanced | None = None
        self._runs: dict[tuple[str, int], RunAdvanced] = {}

    def take(self, event: Event) -> None:
        """Remember what is to be seen of it."""
        if isinstance(event, ComparisonBegins):
            self._strategies, self._num_seeds = tuple(event.strategies), event.num_seeds
            self._done, self._total = event.num_done, event.num_trials
        elif isinstance(event, RunAdvanced):
            self._done, self._total, self._eta_s = event.num_done, event.num_trials, event.eta_s
            self._runs[event.strategy, event.seed] = self._latest = event
        elif isinstance(event, Note) and event.phase == "confirm":
            self._stage, self._unit, self._eta_s, self._latest = "confirm", "prompts", None, None
            self._done = self._total = 0
        elif isinstance(event, PicksAdvanced):
            self._done, self._total, self._eta_s = event.num_done, event.num_turns, event.eta_s

    def replaces(self, event: Event) -> bool:
        """Whether what this event says is in the view, so that it needs no line of its own."""
        return isinstance(event, RunAdvanced | PicksAdvanced)

    def is_over(self, event: Event) -> bool:
        """Whether nothing is left to watch from this event on: the table follows."""
        return isinstance(event, Note) and event.phase is None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, width = labelled_rows(options)
        left = "" if self._eta_s is None else f", {duration(self._eta_s)} left"
        said = f"{self._done} of {self._total}{left}" if self._total else "about to start"
        table.add_row("phase", Text(f"[{self._stage}]", "bold"))
        table.add_row(self._unit, bar_row(self._done, self._total, said, width))
        if (one := self._latest) is not None:
            table.add_row("run", Text(f"{one.strategy}, seed {one.seed}: {one.num_run_trials} trials"))
        rows = [self._strategy_row(name) for name in self._strategies if any(key[0] == name for key in self._runs)]
        room = max(1, options.size.height - 4)  # for the rows above and the cursor's line
        for i, row in enumerate(rows[:room]):
            table.add_row("" if i else "best", row)
        yield table

    def _strategy_row(self, name: str) -> Text:
        """Of the runs that have had a turn since this command began; an earlier part's are known after their next."""
        runs = [run for (strategy, _), run in self._runs.items() if strategy == name]
        speedups = [run.leader.speedup for run in runs if run.leader is not None]
        best = f"{geometric_mean(speedups):.2f}x" if speedups else "none"
        text = Text(f"{best:<6}{name}", no_wrap=True, overflow="ellipsis")
        counts = [run.num_run_trials for run in runs]
        return text.append(f"  {min(counts)}..{max(counts)} trials, {len(runs)} of {self._num_seeds} seeds", "dim")
