"""What the studies of the engine write: JSON with the machine's facts, and a Markdown table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import write_atomically
from layerskip.machine.host import cpu_name, git_commit, package_version

FOLDER = Path(__file__).parent


def facts(command: str) -> dict[str, Any]:
    """Of this machine and run."""
    return {
        "command": command,
        "cpu": cpu_name(),
        "versions": {name: package_version(name) for name in ("layerskip", "torch", "transformers")},
        "commit": git_commit(FOLDER),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def command_of(prog: str, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command that was given, without what stands as it is by default."""
    parts = [f"python -m {prog}"]
    for name, value in vars(arguments).items():
        if value is not None and value != parser.get_default(name):
            values = value if isinstance(value, list) else [value]
            parts.append(f"--{name.replace('_', '-')} {' '.join(map(str, values))}")
    return " ".join(parts)


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


def write_study(folder: Path, name: str, record: Mapping[str, Any], table: str) -> None:
    """NAME.json with the machine's facts, and NAME.md, which is said too."""
    write_json(folder / f"{name}.json", facts(f"python -m studies.engine.{name}") | record)
    (folder / f"{name}.md").write_text(table, encoding="utf-8")
    say(table)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column on the left, the others on the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
