"""python -m studies.audit.run: random greedy runs on every engine against Hugging Face's own `generate`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from layerskip.command_line.cli import OneLineParser, check_least
from studies.audit.cases import VERSION, Case, draw_case
from studies.audit.record import VERDICTS, Record
from studies.audit.subjects import Outcome, Subjects
from studies.results import facts, run_study, say

PROG = "studies.audit.run"
RESULT = Path(__file__).parent / "result.json"
_SAVE_EVERY = 100
_SAY_EVERY = 1_000


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 lossless, 1 a failure was found, 2 bad input."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="runs in total, those in the file included")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--out", type=Path, default=RESULT, help="the record; an unfinished one is continued")
    parser.add_argument("--fresh", action="store_true", help="start anew, over an existing record")
    parser.add_argument(
        "--replay",
        type=int,
        nargs="*",
        metavar="NUMBER",
        help="run cases of these numbers again and show them; without a number, the record's failures",
    )
    return run_study(PROG, parser, _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # tiny models lose more to thread barriers than they gain
    check_least(arguments, cases=1)
    if arguments.replay is not None:
        return _replay(arguments)
    record = _open(arguments)
    campaign(record, arguments.seed, arguments.cases, arguments.out)
    for line in summary(record):
        say(line)
    return 1 if record.failures else 0


def campaign(record: Record, seed: int, num_cases: int, path: Path) -> None:
    """Run what the record lacks of `num_cases`, saving it as it grows and when interrupted."""
    subjects = Subjects()
    try:
        while record.num_done < num_cases:
            case = draw_case(seed, record.num_done)
            outcome = subjects.run(case)
            record.add(case, outcome)
            if outcome.verdict == "failure":
                for line in describe(case, outcome):
                    say(line)
            if record.num_done % _SAVE_EVERY == 0:
                record.save(path)
            if record.num_done % _SAY_EVERY == 0:
                say(f"{record.num_done:6} of {num_cases}: {len(record.failures)} failures, {len(record.ties)} ties")
    finally:
        record.save(path)


def summary(record: Record) -> list[str]:
    """The record in a few lines."""
    tables = (record.by_dtype, record.by_engine, record.by_drafter)
    rows = [(f"{name:20}", counts) for table in tables for name, counts in table.items()]
    lines = [f"{record.num_done} runs, seed {record.facts['seed']}"]
    lines += [name + "".join(f"  {counts[one]:6} {one}" for one in VERDICTS) for name, counts in rows]
    done = record.decoded
    share = done["num_accepted"] / max(1, done["num_drafted"])
    drafted = f"{done['num_drafted']} drafted, {share:.0%} accepted"
    lines.append(f"{done['num_emitted']} tokens, {done['num_rounds']} rounds, {drafted}")
    if found := done.get("num_looked_up"):
        share = done["num_looked_up_accepted"] / found
        lines.append(f"{done['num_lookup_rounds']} rounds with {found} looked-up tokens, {share:.0%} accepted")
    return lines


def describe(case: Case, outcome: Outcome) -> list[str]:
    """One case and what came of it."""
    return [
        f"case {case.number}: {outcome.verdict}: {case.architecture}, {case.engine}, {case.dtype}: {case.config!r}",
        f"  prompt {list(case.prompt)}, budget {case.budget}, eos {list(case.eos)}",
        f"  expected {outcome.expected}",
        f"  got      {outcome.error or outcome.ids}",
        f"  {outcome.report}",
    ]


def _open(arguments: argparse.Namespace) -> Record:
    about: dict[str, Any] = {**facts(f"python -m {PROG}"), "seed": arguments.seed, "cases_version": VERSION}
    if arguments.fresh or not arguments.out.exists():
        return Record(about)
    record = Record.load(arguments.out)
    record.check_same(about, arguments.out)
    if record.num_done < arguments.cases:
        say(f"{arguments.out}: going on after {record.num_done} runs")
    return replace(record, facts=about if record.num_done < arguments.cases else record.facts)


def _replay(arguments: argparse.Namespace) -> int:
    cases: Sequence[Case] = [draw_case(arguments.seed, number) for number in arguments.replay]
    if not arguments.replay:
        cases = Record.load(arguments.out).found_cases
        if not cases:
            say(f"{arguments.out}: no failures to run again")
    subjects, num_failures, start = Subjects(), 0, time.monotonic()
    for case in cases:
        outcome = subjects.run(case)
        num_failures += outcome.verdict == "failure"
        for line in describe(case, outcome):
            say(line)
    if cases:
        say(f"{len(cases)} runs, {num_failures} failures, {time.monotonic() - start:.1f} s")
    return 1 if num_failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
