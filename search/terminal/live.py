"""LiveReporter: on a terminal, lines for what stays, and under them a view of the search, drawn between trials."""

from __future__ import annotations

import os
import sys
from typing import IO

from rich.console import Console
from rich.live import Live

from search.terminal.event import Event
from search.terminal.progress_events import StudyOpened
from search.terminal.reporter import JsonReporter, QuietReporter, Reporter
from search.terminal.view import LiveView


class LiveReporter(Reporter):
    """The lines of the plain view over a live view, which shows the trials instead of a line for each.

    The view comes with a study, and is gone before its result is told, so what stays behind is
    lines alone. Trials without numbers keep their line: they are looked for later.
    """

    def __init__(self, stream: IO[str] | None = None, console: Console | None = None) -> None:
        super().__init__(stream)
        self._console = console or self._console
        self._view = LiveView()
        self._live: Live | None = None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._stop()

    def tell(self, event: Event) -> None:
        if self._view.is_over(event):
            self._stop()
        self._view.take(event)
        if not self._view.replaces(event):
            super().tell(event)  # each line draws the view anew
        elif self._live is not None:
            self._live.refresh()
        if isinstance(event, StudyOpened) and self._live is None:
            self._start()

    def _start(self) -> None:
        # No refreshing thread: it would run beside the timed decodings. The view changes when an event is told, and
        # none is told while the clock runs.
        self._live = Live(
            self._view, console=self._console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty()
        )
        self._live.start(refresh=True)
        # A cursor that is never hidden needs nobody to bring it back, not even after a kill -9 or a Ctrl-Z.
        self._console.show_cursor()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        # Nothing higher than the screen may be left to erase: what has scrolled out of it cannot be.
        live.update("")
        live.stop()


def make_reporter(*, quiet: bool, json_lines: bool) -> Reporter:
    """What the flags ask for; without any, a live view on a terminal that can show one, and plain lines elsewhere."""
    if json_lines:
        return JsonReporter()
    if quiet:
        return QuietReporter()
    # rich also takes a pipe for a terminal where FORCE_COLOR is set: right for colours, wrong for moving the cursor.
    if sys.stdout.isatty() and os.environ.get("TERM") and Console().is_interactive:
        return LiveReporter()
    return Reporter()
