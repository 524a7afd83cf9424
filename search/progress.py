"""Progress: what a person sees of a search; a bar on a terminal, plain ASCII lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """Prints phases, trials and verdicts. The only part of the search that prints."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether colours and a moving bar make sense."""
        return self._console.is_terminal

    def phase(self, name: str, text: str) -> None:
        """First line of a phase, or another one of it."""
        if self.is_terminal:
            self._console.print(f"[bold cyan]{name:<9}[/] {escape(text)}")
        else:
            self.line(f"{name:<9} {text}")

    def line(self, text: str, style: str | None = None) -> None:
        """One line; `style` only on a terminal."""
        if self.is_terminal:
            self._console.print(escape(text), style=style)
        else:
            # A log in some other encoding must not end a search.
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        """A line that must not be overlooked."""
        self.line(text, "bold red")

    @contextmanager
    def trials(self, done: int, total: int) -> Iterator[None]:
        """A bar under the trial lines while in here."""
        if not self.is_terminal:
            yield
            return
        columns = (
            TextColumn("trials"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            bar.add_task("trials", total=total, completed=done, eta="")
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def trial(self, text: str, done: int, eta: str, *, bad: bool) -> None:
        """One finished trial."""
        self.line(text, "red" if bad else None)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, eta=f"eta {eta}")


def trial_line(trial: FrozenTrial, done: int, total: int, best: str) -> str:
    """One trial in one line of at most about 150 ASCII characters."""
    attrs = trial.user_attrs
    head = f"trial {done:>{len(str(total))}}/{total}"
    origin = attrs.get("origin", "?")
    if "repeat_of" in attrs:
        origin = f"repeat of #{attrs['repeat_of']}"
    if trial.state == TrialState.PRUNED:
        return f"{head}  NOT LOSSLESS: {attrs.get('violation')}; mask {attrs.get('skip_mask')}  [{origin}]"
    if trial.state == TrialState.FAIL or trial.value is None:
        return f"{head}  failed: {attrs.get('failure', 'no reason kept')}  [{origin}]"
    interval = "           "
    if "speedup_ci_low" in attrs and not attrs.get("stopped_early"):
        interval = f"{attrs['speedup_ci_low']:.2f}..{attrs['speedup_ci_high']:.2f}"
    stopped = "<" if attrs.get("stopped_early") else " "
    layers = attrs.get("skip_mask", "?").partition(":")[0]
    parts = [
        f"{head} {stopped}{trial.value:7.1f} tok/s",
        f"{attrs['speedup']:.2f}x {interval:<11}",
        f"best {best}",
        f"accept {_number(attrs.get('acceptance_rate'))}",
        f"len {_number(attrs.get('mean_accepted_length'))}",
        f"skip attn {attrs['num_skipped_attention']:>2} mlp {attrs['num_skipped_mlp']:>2} of {layers}",
        f"gamma {trial.params.get('gamma', '?')}",
        f"[{origin}]",
    ]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None) -> str:
    return "  - " if value is None else f"{value:4.2f}"
