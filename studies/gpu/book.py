"""Book: what one part of the GPU study has found so far, in one JSON file that is whole at every moment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import write_atomically

DONE, RUNNING, FAILED, STOPPED, WAITING = "done", "running", "failed", "stopped", "waiting"
"""States of a step; `stopped` by its time limit, `waiting` before its turn."""


class Book:
    """`record` holds `part`, `size`, `workers` (facts of the machine, one entry for each process) and `steps` by name.

    Written anew, in one rename, after every change: whoever is killed leaves all that was found before.
    """

    def __init__(self, file: Path, record: dict[str, Any]) -> None:
        self.file = file
        self.record = record

    @classmethod
    def open(cls, file: Path, part: str, size: str) -> Book:
        """The file's, so that a part goes on where it was left; a new one where there is no file.

        Raises: ValueError naming the file if it is not a book of this part.
        """
        if not file.is_file():
            return cls(file, {"schema_version": 1, "part": part, "size": size, "workers": [], "steps": {}})
        record = read(file)
        if (record["part"], record["size"]) != (part, size):
            raise ValueError(f"{file}: must be of part {part} at size {size}, got {record['part']} {record['size']}")
        return cls(file, record)

    def is_done(self, step: str) -> bool:
        return self._steps.get(step, {}).get("state") == DONE

    def add_worker(self, facts: Mapping[str, Any]) -> None:
        self.record["workers"].append(dict(facts))
        self._write()

    def plan(self, step: str, bound_s: float) -> None:
        """A step that is to come, without the rows of an earlier try at it."""
        self._steps[step] = {"state": WAITING, "bound_s": bound_s, "seconds": None, "error": None, "rows": []}
        self._write()

    def begin(self, step: str, before: Mapping[str, Any]) -> None:
        """before: the state of the machine."""
        self.note(step, state=RUNNING, before=dict(before))

    def add_row(self, step: str, row: Mapping[str, Any]) -> None:
        self._steps[step]["rows"].append(dict(row))
        self._write()

    def end(self, step: str, state: str, seconds: float | None = None, error: str | None = None) -> None:
        self.note(step, state=state, seconds=None if seconds is None else round(seconds, 3), error=error)

    def note(self, step: str, **values: object) -> None:
        """Facts of a step beside its rows."""
        self._steps[step] |= values
        self._write()

    @property
    def _steps(self) -> dict[str, dict[str, Any]]:
        steps: dict[str, dict[str, Any]] = self.record["steps"]
        return steps

    def _write(self) -> None:
        write_atomically(self.file, json.dumps(self.record, indent=1, default=str) + "\n")


def read(file: Path) -> dict[str, Any]:
    """A book's record. Raises: ValueError naming the file that is none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        steps = record["steps"]
        if not all({"state", "rows"} <= set(step) for step in steps.values()):
            raise KeyError("state, rows")
        return {"part": record["part"], "size": record["size"], "workers": record["workers"], **record}
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: not a file of the GPU study ({type(error).__name__}: {error})") from None
