"""Reporter: tells a run's events as plain lines, as the verdict alone, or as JSON lines. What prints in a search."""

from __future__ import annotations

import json
import sys
from typing import IO

from rich.console import Console
from rich.text import Text

from search.confirm.files import finite
from search.terminal.event import Event, Line, Note, Stopped, Warned

_NAMES_OF_VERDICTS = ("result", "lossy", "ties", "written")


class Reporter:
    """One plain ASCII line after the other; on a terminal the same in colour, which only repeats what words say.

    A context manager, for the sake of the views that must put a terminal back in order.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        return None

    def tell(self, event: Event) -> None:
        """Show an event."""
        for line in event.lines():
            self._print(line)

    def phase(self, name: str | None, text: str) -> None:
        """A remark on a phase, or with None on none; its further lines stand under the first."""
        self.tell(Note(name, text))

    def warn(self, text: str) -> None:
        """What must not be overlooked."""
        self.tell(Warned(text))

    def _print(self, line: Line) -> None:
        # A log or a terminal in some other encoding must not end a search.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = str(line).encode(encoding, "backslashreplace").decode(encoding)
        if self._console.is_terminal:
            styled = Text(text, line.style or "")
            if line.phase is not None:
                styled.stylize("bold cyan", 0, len(line.phase))
            # Broken by the terminal, not by us, so that a line is copied as one line.
            self._console.print(styled, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


class QuietReporter(Reporter):
    """The verdict alone; warnings go to stderr."""

    def __init__(self, stream: IO[str] | None = None, errors: IO[str] | None = None) -> None:
        super().__init__(stream)
        self._errors = Reporter(errors or sys.stderr)

    def tell(self, event: Event) -> None:
        if isinstance(event, Warned):
            self._errors.tell(event)
        elif event.name in _NAMES_OF_VERDICTS:
            super().tell(event)


class JsonReporter(Reporter):
    """One JSON object a line: `event`, its name, and its fields. Numbers that are not finite become null."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """An error that ends a run is its last event; people read of it on stderr, scripts can do without."""
        if isinstance(error, KeyboardInterrupt):
            self.tell(Stopped("interrupted"))
        elif isinstance(error, Exception) and not isinstance(error, BrokenPipeError):
            self.tell(Stopped(" ".join(str(error).split())))

    def tell(self, event: Event) -> None:
        facts = {"event": event.name} | finite(event.fields())
        self._stream.write(json.dumps(facts, allow_nan=False) + "\n")
        self._stream.flush()
