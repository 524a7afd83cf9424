"""python -m studies.memory.search: resident memory of one search over hundreds of trials of the demo model.

The real `search.run`, in a process of its own and with a study of its own in a temporary folder; short trials, so that
there can be many. Writes search.json and table.md; exit code 1 if memory is not flat.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from layerskip.command_line.cli import CommandError, OneLineParser, check_folders, check_least, run_command
from studies.memory.course import FOLDER, Course, check_proc, write_course
from studies.memory.searching import events_of
from studies.results import say
from studies.scaling.servers import ROOT

PROG = "studies.memory.search"
_DEMO = ROOT / "studies" / "demo"
_TOLD_EVERY = 20


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument(
        "--trial-seconds", type=float, default=1.0, help="a trial has at least four prompts all the same"
    )
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--model", type=Path, default=_DEMO / "model", help="folder of a model")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for search.json and table.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        course, states = watch(command(arguments, Path(folder)), arguments.trials)
    more = {
        "model": arguments.model.name,
        "trial_seconds": arguments.trial_seconds,
        "max_new_tokens": arguments.max_new_tokens,
        "trials_by_state": dict(states),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    told = f"python -m {PROG} --trials {arguments.trials}"
    say(write_course(arguments.out, "search", told, course, more))
    return 0 if course.is_flat else 1


def command(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The search, in a folder of its own. `--force`: memory is the question, not whether anything wins."""
    files = {
        "--model": arguments.model.resolve(),
        "--prompts": _DEMO / "tuning.jsonl",
        "--held-out": _DEMO / "held_out.jsonl",
    }
    numbers = {
        "--trials": arguments.trials,
        "--trial-seconds": arguments.trial_seconds,
        "--max-new-tokens": arguments.max_new_tokens,
        "--threads": 1,
    }
    names = {"--study": folder / "study", "--device": "cpu", "--dtype": "float32"}
    flags = [str(word) for pair in (names | files | numbers).items() for word in pair]
    return [sys.executable, "-m", "search.run", "--json", "--force", *flags]


def watch(command: Sequence[str], num_trials: int) -> tuple[Course, Counter[str]]:
    """Its resident memory after every trial that it tells of, and how the trials ended.

    Raises: CommandError if it fails, or has not told of all trials.
    """
    course, states = Course("trials", num_trials), Counter[str]()
    with closing(events_of(command)) as events:
        for event, pid in events:
            if event["event"] == "trial":
                states[event["state"]] += 1
                mib = course.sample(event["num_done"], pid)
                if event["num_done"] % _TOLD_EVERY == 0:
                    say(f"{event['num_done']} of {num_trials} trials: {mib:.0f} MiB")
    if not course.at or course.at[-1] < num_trials:
        raise CommandError(f"the search ended after {course.at[-1] if course.at else 0} of {num_trials} trials")
    return course, states


def _check(arguments: argparse.Namespace) -> None:
    check_proc()
    check_least(arguments, trials=1, max_new_tokens=2)
    if not arguments.trial_seconds > 0:
        raise ValueError(f"--trial-seconds: must be above 0, got {arguments.trial_seconds}")
    check_folders(arguments, "model", "out")


if __name__ == "__main__":
    raise SystemExit(main())
