"""What a terminal shows, as an SVG: of a command that is run, or of a search that a study remembers."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence

import rich._export_format
from rich.console import Console
from rich.text import Text

from search.reporting.record import StudyRecord
from search.terminal.event import Event
from search.terminal.progress_events import ReferenceKnown, SearchBegins, StudyOpened, TrialDone
from search.terminal.reporter import Reporter
from search.terminal.view import LiveView

_SHARE_SHOWN = 0.7
"""Of a study's trials: a search is shown before its end."""
_FONT_FACES = re.compile(r"\s*@font-face \{\{.*?\}\}", re.DOTALL)


def picture_of(draw: Callable[[Console], None], title: str, width: int) -> str:
    """An SVG of a terminal with so many columns; its letters are the reader's own, nothing is fetched."""
    console = Console(
        file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor", highlight=False
    )
    draw(console)
    # Under one id, so that the file changes only where the picture does.
    without_fonts = _FONT_FACES.sub("", rich._export_format.CONSOLE_SVG_FORMAT)
    return console.export_svg(title=title, code_format=without_fonts, unique_id="terminal")


def run_in_terminal(command: Sequence[str], width: int) -> Text:
    """What a command prints on a terminal with so many columns, in its colours.

    Raises: RuntimeError with the last line if it fails.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": str(width)}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    parts = []
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # Linux's way to say that nobody holds the other end any more
            break
        if not part:
            break
        parts.append(part)
    os.close(parent)
    printed = b"".join(parts).decode("utf-8", "replace").replace("\r\n", "\n").rstrip("\n")
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)}: {printed.splitlines()[-1] if printed else 'failed'}")
    return Text.from_ansi(printed)


def live_view(record: StudyRecord, width: int) -> str:
    """`search.run` on a terminal some way into this study: the lines above the view, and the view."""

    def draw(console: Console) -> None:
        view, lines = LiveView(), _Lines(console)
        for event in _events(record):
            view.take(event)
            if not isinstance(event, TrialDone):
                lines.tell(event)
        console.print(view)

    return picture_of(draw, "python -m search.run", width)


class _Lines(Reporter):
    """The lines of a terminal, onto a console that remembers them."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self._console = console


def _events(record: StudyRecord) -> list[Event]:
    """What a search told on its way through the first trials of this study."""
    total = len(record.finished)
    shown = record.finished[: max(1, round(_SHARE_SHOWN * total))]
    leaders = dict(record.leaders)
    spent_s = [float(trial.user_attrs.get("seconds", 0.0)) for trial in shown]
    pace_s = sum(spent_s) / len(spent_s)
    spec = record.attrs["spec"]
    events: list[Event] = [
        StudyOpened(record.name, f"sqlite:///studies/{record.name}/study.db", 0, total),
        ReferenceKnown(record.reference),
        SearchBegins(0, total, spec["sampler"], spec["seed"]),
    ]
    leader = None
    for done, trial in enumerate(shown, start=1):
        leader = leaders.get(trial.number, leader)
        events.append(TrialDone(trial, done, total, leader, pace_s * (total - done)))
    return events
