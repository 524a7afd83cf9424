"""Journal: one JSON object a line, appended and flushed, so that a killed run loses nothing that was finished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from search.compact import parse_lines


class Journal:
    """A JSONL file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. A line without its end was torn by a kill: it is cut off the file.

        Raises: ValueError naming file and line for anything else that is not a JSON object.
        """
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        return parse_lines(whole, self.path)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line and wait until it is on disk."""
        with self.path.open("ab") as file:
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
