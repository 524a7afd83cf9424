"""python -m studies.gpu: measure this project on a CUDA device, in parts that stand by themselves. README.md beside
this says what each part finds."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from layerskip.command_line.cli import OneLineParser, run_command
from studies.gpu.book import Book
from studies.gpu.runner import Part, run_part

PROG = "studies.gpu"
SIZES = {
    "a": ("1b", "3b", "8b", "tiny"),
    "b": ("all", "tiny"),
    "c": ("demo", "1b", "tiny"),
    "d": ("demo", "1b", "tiny"),
}
"""By part, in the order in which they are run where no size is given; `tiny` is the rehearsal on a CPU."""
SECONDS = {
    ("a", "1b"): 255.0,
    ("a", "3b"): 305.0,
    ("a", "8b"): 200.0,
    ("b", "all"): 190.0,
    ("c", "demo"): 190.0,
    ("c", "1b"): 530.0,
    ("d", "demo"): 450.0,
    ("d", "1b"): 520.0,
}
"""Most seconds of each; a rehearsal has what it needs."""
_TINY_S = 540.0
_WORK = Path(__file__).resolve().parent / ".work"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    for part, about in (
        ("a", "speed of every engine on random weights of real shapes, and what speculation gives"),
        ("b", "the tests marked gpu"),
        ("c", "search, confirm and bench: the demo model, then one trained on the spot"),
        ("d", "a layer trained to draft for the models of part c, and every way to draft in one table"),
    ):
        command = commands.add_parser(part, help=about, description=about)
        sizes = SIZES[part]
        command.add_argument(
            "--size", nargs="+", choices=sizes, help=f"one or several [{' '.join(sizes[:-1])}]; tiny: on a CPU"
        )
        command.add_argument("--out", type=Path, required=True, help="folder for PART-SIZE.json, the only file made")
        command.add_argument("--seconds", type=float, help="most seconds of each size, in place of its own limit")
        command.add_argument("--work", type=Path, default=_WORK, help="folder for models and studies")
        command.add_argument(
            "--corpus", type=Path, help="parts c and d: Python sources to train on [the interpreter's own]"
        )
    tables = commands.add_parser("summarise", help="tables of what the parts found, as Markdown")
    tables.add_argument("folder", type=Path, help="where the parts left their files")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "summarise":
        from studies.gpu.summarise import page

        sys.stdout.write(page(arguments.folder))
        return 0
    if arguments.seconds is not None and not arguments.seconds > 0:
        raise ValueError(f"--seconds: must be above 0, got {arguments.seconds}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are here; without a network a look for more would wait
    arguments.out.mkdir(parents=True, exist_ok=True)
    all_done = True
    for size in arguments.size or SIZES[arguments.command][:-1]:
        part = _part(arguments, size)
        book = Book.open(arguments.out / f"{part.name}-{size}.json", part.name, size)
        seconds = arguments.seconds or SECONDS.get((part.name, size), _TINY_S)
        all_done = run_part(part, book, seconds) and all_done
    return 0 if all_done else 1


def _part(arguments: argparse.Namespace, size: str) -> Part:
    # Each imports torch, which this process need not do for the parts that it does not run.
    if arguments.command == "a":
        from studies.gpu.engine_part import EnginePart

        return EnginePart(size)
    if arguments.command == "b":
        from studies.gpu.gpu_tests import GpuTests

        return GpuTests(size)
    from studies.gpu.drafters_job import DraftersJob
    from studies.gpu.main_job import MainJob

    job = MainJob if arguments.command == "c" else DraftersJob
    return job(size, arguments.work.resolve(), arguments.corpus and arguments.corpus.resolve())


if __name__ == "__main__":
    raise SystemExit(main())
