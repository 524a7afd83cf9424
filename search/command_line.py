"""What the commands of the search share: what a run prints, and the study that is taken without flags."""

from __future__ import annotations

from pathlib import Path

from layerskip.command_line.cli import OneLineParser


def add_output_flags(parser: OneLineParser) -> None:
    """What a run prints; see `search.terminal.live.make_reporter`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help="print the result alone; warnings still go to stderr")
    group.add_argument("--json", action="store_true", help="print one JSON object per event and nothing else")


def demo_folder() -> Path:
    """The study that is searched without flags: here, or beside the package."""
    here = Path("studies/demo")
    return here if here.is_dir() else Path(__file__).parents[1] / here
