"""python -m studies.pictures: the READMEs' pictures of every surface, made from a finished study."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from layerskip.command_line.cli import CommandError, OneLineParser, run_command

PROG = "studies.pictures"
_HERE = Path(__file__).parent
_EPILOG = """\
Of the demo, or of any other finished study (--study), from its database or its archive. The pictures hold that study's
numbers; the notebooks and layerskip.generate are run anew. Needs Chromium and the packages of the test extra."""


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--study", type=Path, default=_HERE.parent / "demo", help="folder of a finished study")
    parser.add_argument("--out", type=Path, default=_HERE, help="folder of the pictures")
    parser.add_argument("--only", metavar="NAMES", help="some of report,dashboard,terminal,notebooks,generate")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    study: Path = arguments.study
    if not (study / "best.json").is_file():
        raise FileNotFoundError(f"{study / 'best.json'}: no such file; name a finished study (--study)")
    from studies.pictures.surfaces import SURFACES

    names = list(SURFACES) if arguments.only is None else [one.strip() for one in arguments.only.split(",")]
    if unknown := [name for name in names if name not in SURFACES]:
        raise ValueError(f"--only: must be of {', '.join(SURFACES)}, got {unknown[0]!r}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        try:
            written = SURFACES[name](study, arguments.out)
        except RuntimeError as error:
            raise CommandError(str(error)) from error
        for file in written:
            sys.stdout.write(f"{file}  {file.stat().st_size / 1000:.0f} kB\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
