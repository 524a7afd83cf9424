"""python -m search.report: what a study found, as one page, Markdown, JSON or CSV; also while the study is running."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from layerskip.command_line.cli import OneLineParser, run_command
from search.command_line import demo_folder
from search.storages.address import STORAGE_HELP, storage_argument

if TYPE_CHECKING:
    from search.reporting.record import StudyRecord

PROG = "search.report"
FORMATS = ("html", "md", "short", "json", "csv")
_EPILOG = """\
html: one page with all figures, which needs no network; md: the same in Markdown, without pictures; short: a block of
Markdown to paste into an issue; json: the verdict and all trials; csv: a line per trial. Everything comes from the
study's storage and nothing is measured."""


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__, epilog=_EPILOG)
    parser.add_argument("study", nargs="?", help="study folder, or its study.toml; the demo without it")
    parser.add_argument("--format", choices=FORMATS, default="html", help="default html")
    parser.add_argument("--out", metavar="FILE", help="where to; STUDY/report.html for html, else standard output (-)")
    parser.add_argument("--storage", help=STORAGE_HELP)
    parser.add_argument("--study-name", help="name inside the storage; of a per-group search NAME/GROUP")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    from search.reporting.record import read_record
    from search.reporting.source import Address, opened
    from search.storages.address import near

    address = Address(arguments.study, storage_argument(arguments.storage), arguments.study_name)
    with opened(address, demo=demo_folder()) as source:
        record = read_record(source.load())
        if not record.finished:
            raise ValueError(f"study {record.name!r}: no trial has finished yet, so there is nothing to report")
        text = renderer(arguments.format)(record, source.paths.folder)
    out = arguments.out or (str(source.paths.report) if arguments.format == "html" else "-")
    if out == "-":
        sys.stdout.write(text)
        return 0
    from layerskip.config.decode_config import write_atomically

    write_atomically(Path(out).expanduser(), text)
    sys.stdout.write(f"{near(Path(out).expanduser().absolute())}\n")
    return 0


def renderer(form: str) -> Callable[[StudyRecord, Path | None], str]:
    """What makes text of a record."""
    from search.reporting import render, tables

    return {
        "html": render.to_html,
        "md": render.to_markdown,
        "short": render.to_short_markdown,
        "json": lambda record, _folder: tables.to_json(record),
        "csv": lambda record, _folder: tables.to_csv(record),
    }[form]


if __name__ == "__main__":
    raise SystemExit(main())
