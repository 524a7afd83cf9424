"""python -m studies.machine.teams: decoding alone, in a second thread and beside another program, watched or not.

What `layerskip.openmp` does about threads that wait for each other, and what happens without. Every measurement is a
process of its own; all come once a repeat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from layerskip.command_line.cli import CommandError, OneLineParser, check_least
from layerskip.cpp_library import SWITCH
from studies.machine.decode import SECOND_THREAD
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, spread
from studies.scaling.servers import ROOT

PROG = "studies.machine.teams"
_BESIDE = "beside another program"
_PLACES = ("alone", SECOND_THREAD, _BESIDE)
_WAYS = ("plain", "speculative")


@dataclass(frozen=True)
class Measured:
    """One process that decoded."""

    kernels: bool
    """Whether compiled kernels computed, or torch's modules."""
    place: str
    is_watched: bool
    tokens_per_s: dict[str, float]
    """Plain and with 8-bit drafts."""
    other_per_s: float | None
    """What the other program got done meanwhile."""


@contextmanager
def _other_process(num_threads: int) -> Iterator[list[float]]:
    """Runs it; afterwards the list has how many products it made a second."""
    command = [sys.executable, "-m", "studies.machine.other_process", str(num_threads)]
    found: list[float] = []
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        began = time.perf_counter()
        try:
            yield found
        finally:
            seconds = time.perf_counter() - began
            told = process.communicate("\n")[0]
        found.append(int(told) / seconds)


def measure(arguments: argparse.Namespace, *, kernels: bool, place: str, is_watched: bool) -> Measured:
    """Of the first prompt's text. Raises: CommandError where it cannot be decoded."""
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    environment |= {} if kernels else {SWITCH: "0"}
    command = [sys.executable, "-m", "studies.machine.decode", arguments.model, arguments.dtype]
    command += [str(arguments.prompts), str(arguments.threads), str(arguments.seconds), place]
    command += [] if is_watched else ["unwatched"]
    others: list[float] = []
    with _other_process(arguments.threads) if place == _BESIDE else nullcontext(others) as others:
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(done.stderr.strip().rpartition("\n")[2])
    speeds = json.loads(done.stdout.splitlines()[-1])
    return Measured(kernels, place, is_watched, speeds, others[0] if others else None)


def table(found: Sequence[Measured]) -> str:
    """A line for each engine and place; medians, lowest and highest over the processes."""
    rows = []
    for kernels, place in dict.fromkeys((one.kernels, one.place) for one in found):
        some = [one for one in found if (one.kernels, one.place) == (kernels, place)]
        row = ["kernels" if kernels else "modules", place]
        for way, is_watched in itertools.product(_WAYS, (True, False)):
            row.append(spread([one.tokens_per_s[way] for one in some if one.is_watched == is_watched], 1))
        for is_watched in (True, False):
            others = [one.other_per_s for one in some if one.other_per_s is not None and one.is_watched == is_watched]
            row.append(spread(others, 1) if others else "")
        rows.append(row)
    header = [
        f"{what}{how}" for what in (*_WAYS, "the other program's products a second") for how in ("", ", unwatched")
    ]
    return markdown_table(["engine", "where", *header], rows)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(STUDIES / "smollm2" / "model"), help="Hugging Face id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=Path, default=STUDIES / "smollm2" / "held_out.jsonl")
    parser.add_argument("--seconds", type=float, default=6.0, help="that a process decodes each way, or 512 tokens")
    parser.add_argument("--threads", type=int, default=2, help="of either process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, seconds=0, threads=1, repeats=1)
    check_out(arguments.out)
    kinds = list(itertools.product((True, False), _PLACES, (True, False)))
    found = []
    for repeat in range(arguments.repeats):
        turn = repeat * len(kinds) // arguments.repeats
        for kernels, place, is_watched in kinds[turn:] + kinds[:turn]:
            found.append(measure(arguments, kernels=kernels, place=place, is_watched=is_watched))
    found.sort(key=lambda one: (not one.kernels, _PLACES.index(one.place)))
    record = facts(arguments.command) | {"num_threads": arguments.threads, "found": [asdict(one) for one in found]}
    finish(arguments.out, record, table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
