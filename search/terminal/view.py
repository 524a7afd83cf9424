"""LiveView: the state of a search in a dozen short rows, for terminals of 40 columns and more."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import geometric_mean, median

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from layerskip.config.skip_mask import SkipMask
from search.measure.reference import Reference
from search.study.attributes import PLAIN_TOKENS_PER_S_BY_PROMPT, PROMPT_STEPS, SPEEDUP, STOPPED_EARLY
from search.study.config_words import beside_skipping, describe
from search.study.leaderboard import Entry
from search.study.trials import tokens_per_s_of
from search.terminal.event import Event, Note
from search.terminal.progress_events import Drifted, ReferenceKnown, SearchBegins, StudyOpened, TrialDone
from search.terminal.result_events import Result
from search.terminal.text import duration, interval_of, origin_of, trouble_of

STAGES = ("reference", "outlook", "search", "confirm")
_NUM_LATEST = 5
_LABEL_WIDTH = 8
"""Of the names in front, with a blank."""
_BAR_WIDTH = 40
_WIDE = 60
"""Columns of the rows from which on they say all they can."""
_STEADY = 0.1
"""How far off the usual pace is no drift."""


class LiveView:
    """A rich renderable that is told every event with `take` and shows what they add up to.

    Rows are no longer than they must be, in terminals of any width, so that few of them break where a window shrinks.
    """

    def __init__(self) -> None:
        self._stage = STAGES[0]
        self._begin(0, 0)

    def _begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        self._eta_s: float | None = None
        self._leader: Entry | None = None
        self._latest: deque[TrialDone] = deque(maxlen=_NUM_LATEST)
        self._reference: Reference | None = None
        self._pace = Pace()
        self._drift: Drifted | None = None

    def take(self, event: Event) -> None:
        """Remember what is to be seen of it."""
        named = event.phase if isinstance(event, Note) else event.name
        if named in STAGES:
            self._stage = named
        if isinstance(event, StudyOpened):
            self._stage = STAGES[0]
            self._begin(event.num_done, event.num_trials)
        elif isinstance(event, SearchBegins):
            self._done, self._total = event.num_done, event.num_trials
        elif isinstance(event, ReferenceKnown):
            self._reference = event.reference
        elif isinstance(event, Drifted):
            self._drift = event
        elif isinstance(event, TrialDone):
            self._done, self._eta_s, self._leader = event.num_done, event.eta_s, event.leader
            self._latest.appendleft(event)
            self._pace.take(event.trial)

    def replaces(self, event: Event) -> bool:
        """Whether what this event says is in the view, so that it needs no line of its own."""
        return isinstance(event, TrialDone) and event.is_good

    def is_over(self, event: Event) -> bool:
        """Whether nothing is left to watch from this event on."""
        return isinstance(event, Result)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, width = labelled_rows(options)
        best, machine = self._best_rows(width), self._machine_rows(wide=width >= _WIDE)
        room = max(1, options.size.height - len(best) - len(machine) - 3)  # for phase, trials and the cursor's line
        latest = [_trial_row(one.trial, wide=width >= _WIDE) for one in list(self._latest)[:room]]
        table.add_row("phase", self._phase_row(width))
        left = "" if self._eta_s is None else f", {duration(self._eta_s)} left"
        table.add_row("trials", bar_row(self._done, self._total, f"{self._done} of {self._total}{left}", width))
        for label, rows in (("best", best), ("latest", latest), ("machine", machine)):
            for i, row in enumerate(rows):
                table.add_row("" if i else label, row)
        yield table

    def _phase_row(self, width: int) -> Text:
        if width < _WIDE:
            return Text(f"{self._stage} ({STAGES.index(self._stage) + 1} of {len(STAGES)})", "bold")
        row = Text()
        for i, name in enumerate(STAGES):
            row.append(" > " if i else "", "dim")
            here = name == self._stage
            row.append(f"[{name}]" if here else name, "bold" if here else "dim")
        return row

    def _best_rows(self, width: int) -> list[Text]:
        leader = self._leader
        if leader is None:
            resumed = self._done and not self._latest  # it has a leader, which the next trial names
            return [Text("known after the next trial" if resumed else "none measured in full yet", "dim")]
        # The bound is one-sided 95 %, of a log speedup: its mirror image ends the interval that holds 90 %.
        interval = f"{leader.lower:.2f}..{leader.speedup**2 / leader.lower:.2f}"
        speed = Text.assemble((f"{leader.speedup:.2f}x", "bold green" if leader.lower > 1 else "bold"), f" {interval}")
        if width >= _WIDE:
            speed.append(f"  90 % interval of {leader.num_pairs} pairs, first in trial #{leader.trials[0]}", "dim")
        setting = describe(leader.config)
        by_mask = f"mask {leader.config.skip_mask}, "
        if len(setting) > width and setting.startswith(by_mask):  # the picture shows what is skipped
            words = [beside_skipping(str(leader.config.skip_mask)), setting.removeprefix(by_mask)]
            setting = ", ".join(filter(None, words))
        return [speed, Text(setting), *_picture(leader.config.skip_mask, width)]

    def _machine_rows(self, *, wide: bool) -> list[Text]:
        if self._reference is None:
            return []
        plain = f"plain {self._reference.plain_tokens_per_s:.1f} tok/s"
        noise = f"noise {100 * self._reference.noise_sigma:.1f} %"
        rows = [Text(f"{plain}, A/A {noise} a pair" if wide else f"{plain}, {noise}")]
        if (now := self._pace.now) is not None:
            row = Text(f"pace {now:.2f} of usual: ")
            rows.append(row.append("steady") if abs(now - 1) < _STEADY else row.append("DRIFTS", "bold yellow"))
        if self._drift is not None and self._drift.is_notable:
            rows.append(Text(f"verifying {self._drift.verify_times:.2f} of start: ").append("DRIFTS", "bold yellow"))
        return rows


def labelled_rows(options: ConsoleOptions) -> tuple[Table, int]:
    """A table of rows with a name in front, and how wide they may be."""
    width = max(options.max_width - _LABEL_WIDTH, 8)
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=_LABEL_WIDTH - 1, no_wrap=True, style="bold cyan")
    table.add_column(max_width=width, overflow="fold")
    return table, width


def bar_row(done: int, total: int, said: str, width: int) -> Table:
    """A bar, and beside it how far it is in words."""
    row = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    bar_width = max(4, min(_BAR_WIDTH, width - len(said) - 1))
    row.add_row(ProgressBar(max(total, 1), done, width=bar_width, complete_style="cyan"), Text(said, no_wrap=True))
    return row


class Pace:
    """How fast the machine is now: plain decoding in the last trials against the usual speed on the same prompts."""

    def __init__(self) -> None:
        self._rates: defaultdict[int, list[float]] = defaultdict(list)
        self._latest: deque[list[tuple[int, float]]] = deque(maxlen=_NUM_LATEST)

    def take(self, trial: FrozenTrial) -> None:
        """Remember a trial's plain speeds, if it has any."""
        attrs = trial.user_attrs
        rates = list(zip(attrs.get(PROMPT_STEPS, ()), attrs.get(PLAIN_TOKENS_PER_S_BY_PROMPT, ()), strict=False))
        if rates:
            self._latest.append(rates)
        for step, rate in rates:
            self._rates[step].append(rate)

    @property
    def now(self) -> float | None:
        """1 is the usual pace of this run; None before any trial."""
        if not self._latest:
            return None
        return median(
            geometric_mean([rate / median(self._rates[step]) for step, rate in rates]) for rates in self._latest
        )


def _trial_row(trial: FrozenTrial, *, wide: bool) -> Text:
    head = f"#{trial.number:<4} "
    if (trouble := trouble_of(trial)) is not None:
        return _one_line(head, (trouble, "bold red" if trial.state == TrialState.PRUNED else "red"))
    interval = "stopped early" if trial.user_attrs.get(STOPPED_EARLY) else interval_of(trial)
    speed = f"{trial.user_attrs[SPEEDUP]:.2f}x {interval:<13}"
    style = "dim" if trial.user_attrs.get(STOPPED_EARLY) else ""
    if wide:
        speed += f"  {tokens_per_s_of(trial):7.1f} tok/s  gamma {trial.params.get('gamma', '?')}  {origin_of(trial)}"
    return _one_line(head, (speed, style))


def _one_line(*parts: str | tuple[str, str]) -> Text:
    text = Text.assemble(*parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _picture(mask: SkipMask, width: int) -> list[Text]:
    """Attention over MLP, one character a layer; where there are more layers than columns, pair under pair of rows."""
    rows = mask.picture().splitlines()
    head = rows[0].index(" ") + 1
    step = max(1, width - head)
    num_parts = math.ceil((len(rows[0]) - head) / step)
    parts = [Text(row[:head] + row[head + i * step : head + (i + 1) * step]) for i in range(num_parts) for row in rows]
    if width >= _WIDE and len(parts[-1]) + 30 < width:
        parts[-1].append("  x skipped by the draft, . kept", "dim")
    return parts
