"""How many trials of a comparison fit into a time: `python -m studies.gpu.trials --help`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from layerskip.cli import OneLineParser, run_command
from search.spec import StudySpec, load_spec

PROG = "studies.gpu.trials"
PREPARATION_S = 45.0  # loading, the reference, the readings that proposals are made from
SLACK = 1.25  # a pair's prompts, and drafts slower than plain decoding


def trials_that_fit(plain_tokens_per_s: float, seconds: float, num_runs: int, spec: StudySpec, most: int) -> int:
    """Trials per run, from 1 to `most`, that leave time for one pass of confirming every run's leader.

    Raises: ValueError where the speed is not above 0.
    """
    if not plain_tokens_per_s > 0:
        raise ValueError(f"plain_tokens_per_s: must be above 0, got {plain_tokens_per_s}")
    pair_s = SLACK * 2 * spec.max_new_tokens / plain_tokens_per_s
    left_s = seconds - PREPARATION_S - num_runs * spec.num_confirm_prompts * pair_s
    return max(1, min(int(left_s / (num_runs * (spec.prompts_per_trial or 4) * pair_s)), most))


def main(argv: list[str] | None = None) -> int:
    """The command: prints the number; returns its exit code."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Print how many trials a run of search.compare may make for the comparison to end in time.",
    )
    parser.add_argument("--study", required=True, help="study folder of the comparison")
    parser.add_argument("--summary", type=Path, required=True, help="summary.json of a search: how fast the model is")
    parser.add_argument("--seconds", type=float, required=True, help="time of the whole comparison")
    parser.add_argument("--runs", type=int, required=True, help="strategies times seeds")
    parser.add_argument("--most", type=int, required=True, help="no more trials than these")
    given = parser.parse_args(argv)

    def count() -> int:
        spec, _ = load_spec({}, given.study, demo=Path())
        speed = json.loads(given.summary.read_text(encoding="utf-8"))["reference"]["plain_tokens_per_s"]
        sys.stdout.write(f"{trials_that_fit(speed, given.seconds, given.runs, spec, given.most)}\n")
        return 0

    return run_command(PROG, count)


if __name__ == "__main__":
    raise SystemExit(main())
