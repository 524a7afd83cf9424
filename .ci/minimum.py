"""The lowest admitted version of every direct requirement, as constraints for pip: `python .ci/minimum.py --help`.

Reads pyproject.toml alone, so that no second list can differ from it, and needs no package.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[(?P<extras>[a-z, ]+)\])?(>=(?P<lowest>[0-9.]+))?(,<[0-9.]+)?")


def direct_requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """What the project and its extras require, extras that name other extras of it included, as written."""
    found, queue, seen = list(project["dependencies"]), list(extras), set()
    while queue:
        extra = queue.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for text in project["optional-dependencies"][extra]:
            if (own := re.fullmatch(rf"{project['name']}\[([a-z, ]+)\]", text)) is not None:
                queue += own[1].replace(" ", "").split(",")
            else:
                found.append(text)
    return found


def lowest(requirement: str) -> tuple[str, str]:
    """(name, lowest version admitted). Raises: ValueError where the requirement has no lower bound."""
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None or match["lowest"] is None:
        raise ValueError(f"pyproject.toml: {requirement!r} must be NAME>=VERSION or NAME>=VERSION,<VERSION")
    return match["name"], match["lowest"]


def constraints(project: Mapping[str, Any], extras: Iterable[str], free: Iterable[str]) -> list[str]:
    """A line a requirement, by name; those `free` have none."""
    bounds = dict(map(lowest, direct_requirements(project, extras)))
    if unknown := set(free) - set(bounds):
        raise ValueError(f"--free: must be direct requirements, got {', '.join(sorted(unknown))}")
    return sorted(f"{name}=={version}" for name, version in bounds.items() if name not in set(free))


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Print pip constraints of the lowest admitted versions.")
    parser.add_argument("--extra", action="append", default=[], help="an extra that will be installed; may be repeated")
    parser.add_argument("--free", nargs="*", default=[], metavar="NAME", help="requirements to leave to pip's choice")
    given = parser.parse_args(argv)
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    sys.stdout.write("".join(f"{line}\n" for line in constraints(project, given.extra, given.free)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
