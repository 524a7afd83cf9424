"""What the studies have in common: how their commands run, and what they write."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.machine.host import cpu_name, git_commit, package_version

STUDIES = Path(__file__).parent
ENGINE = STUDIES / "engine"


def run_study(
    prog: str, parser: OneLineParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """What `main` does: parses the arguments, adds the `command` that was given to them, and runs the study with quiet
    libraries; returns the exit code. argv: None for the process's own."""
    arguments = parser.parse_args(argv)
    arguments.command = command_of(prog, sys.argv[1:] if argv is None else argv)

    def quietly() -> int:
        quiet_libraries()
        return run(arguments)

    return run_command(prog, quietly)


def command_of(prog: str, argv: Sequence[str]) -> str:
    """The command as it was given."""
    return shlex.join(["python", "-m", prog, *argv])


def facts(command: str) -> dict[str, Any]:
    """Of this machine and run."""
    return {
        "command": command,
        "cpu": cpu_name(),
        "versions": {name: package_version(name) for name in ("layerskip", "torch", "transformers")},
        "commit": git_commit(STUDIES),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def check_out(out: Path | None) -> None:
    """Raises: FileNotFoundError where the file could not be written, before anything is measured for it."""
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(f"--out: no such folder: {out.parent}")


def say(line: str) -> None:
    """A line of the command's output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(record, indent=1) + "\n")


def finish(out: Path | None, record: Mapping[str, Any], table: str) -> None:
    """Writes the record where there is a file for it, and the table beside it as Markdown; says the table."""
    if out is not None:
        write_json(out, record)
        out.with_suffix(".md").write_text(table, encoding="utf-8")
    say(table)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column on the left, the others on the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    """Median, lowest and highest of the repeats."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"
