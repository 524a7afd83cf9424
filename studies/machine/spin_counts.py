"""python -m studies.machine.spin_counts: decoding alone and beside another program on the same cores, by spin count.

Threads that share a product wait for each other at its end. GNU's OpenMP lets them spin for a number of turns before
they sleep (`GOMP_SPINCOUNT`); beside another program a spinning thread keeps its core from the one it waits for.
Every measurement is a process of its own, as what OpenMP does is settled when it is loaded; all come once a repeat.
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
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, spread
from studies.scaling.servers import ROOT

PROG = "studies.machine.spin_counts"
SPIN_COUNT = "GOMP_SPINCOUNT"
OWN_SPIN_COUNT = 300_000
"""Of GNU's OpenMP, where nothing is said."""
_WAYS = ("plain", "speculative")


@dataclass(frozen=True)
class Measured:
    """One process that decoded."""

    kernels: bool
    """Whether compiled kernels computed, or torch's modules."""
    spin_count: int
    is_alone: bool
    tokens_per_s: dict[str, float]
    """Plain and with 8-bit drafts."""
    other_per_s: float | None
    """What the other program got done meanwhile."""


@contextmanager
def _other_process(num_threads: int) -> Iterator[list[float]]:
    """Runs it; afterwards the list has how many products it made a second."""
    command = [sys.executable, "-m", "studies.machine.other_process", str(num_threads)]
    environment = {name: value for name, value in os.environ.items() if name != SPIN_COUNT}
    found: list[float] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        began = time.perf_counter()
        try:
            yield found
        finally:
            seconds = time.perf_counter() - began
            told = process.communicate("\n")[0]
        found.append(int(told) / seconds)


def measure(arguments: argparse.Namespace, *, kernels: bool, spin_count: int, is_alone: bool) -> Measured:
    """Of the first prompt's text. Raises: CommandError where it cannot be decoded."""
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    environment |= {SPIN_COUNT: str(spin_count)} | ({} if kernels else {SWITCH: "0"})
    command = [sys.executable, "-m", "studies.machine.decode", arguments.model, arguments.dtype]
    command += [str(arguments.prompts), str(arguments.threads), str(arguments.seconds)]
    others: list[float] = []
    with _other_process(arguments.threads) if not is_alone else nullcontext(others) as others:
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(done.stderr.strip().rpartition("\n")[2])
    speeds = json.loads(done.stdout.splitlines()[-1])
    return Measured(kernels, spin_count, is_alone, speeds, others[0] if others else None)


def table(found: Sequence[Measured]) -> str:
    """A line a spin count; medians, lowest and highest over the processes."""
    rows = []
    for kernels, spin_count in dict.fromkeys((one.kernels, one.spin_count) for one in found):
        row = ["kernels" if kernels else "modules", str(spin_count)]
        for is_alone, way in itertools.product((True, False), _WAYS):
            some = [one for one in found if (one.kernels, one.spin_count) == (kernels, spin_count)]
            row.append(spread([one.tokens_per_s[way] for one in some if one.is_alone == is_alone], 1))
        row.append(spread([one.other_per_s for one in some if one.other_per_s is not None], 1))
        rows.append(row)
    header = ["engine", "spin count", *(f"alone, {way}" for way in _WAYS), *(f"beside it, {way}" for way in _WAYS)]
    return markdown_table([*header, "the other program's products a second"], rows)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(STUDIES / "smollm2" / "model"), help="Hugging Face id or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=Path, default=STUDIES / "smollm2" / "held_out.jsonl")
    parser.add_argument("--seconds", type=float, default=6.0, help="that a process decodes each way, or 512 tokens")
    parser.add_argument("--spin-counts", type=int, nargs="+", default=[OWN_SPIN_COUNT, 10_000, 1000, 100])
    parser.add_argument("--threads", type=int, default=2, help="of either process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, seconds=0, spin_counts=0, threads=1, repeats=1)
    check_out(arguments.out)
    kinds = list(itertools.product((True, False), arguments.spin_counts, (True, False)))
    found = []
    for repeat in range(arguments.repeats):
        turn = repeat * len(kinds) // arguments.repeats
        for kernels, spin_count, is_alone in kinds[turn:] + kinds[:turn]:
            found.append(measure(arguments, kernels=kernels, spin_count=spin_count, is_alone=is_alone))
    found.sort(key=lambda one: (not one.kernels, arguments.spin_counts.index(one.spin_count)))
    record = facts(arguments.command) | {"num_threads": arguments.threads, "found": [asdict(one) for one in found]}
    finish(arguments.out, record, table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
