"""python -m studies.proposals: what proposing costs a trial, on a deep model of random weights.

`search.compare --strategies ours` as its own process in a temporary folder, with the demo's prompts and tokenizer; the
seconds are those that it charges a trial for its proposal. Full trials take two seconds, as the demo's do: what a
proposal may read is a share of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from layerskip.command_line.cli import CommandError, OneLineParser, check_least, run_command
from search.outlook.outlook import RECHECK_EVERY
from studies.engine.random_models import random_llama
from studies.engine.results import say
from studies.scaling.servers import ROOT, child_environment

PROG = "studies.proposals"
_DEMO = ROOT / "studies" / "demo"


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--trials", type=int, default=40, help="per seed, at least 2")
    parser.add_argument("--seeds", type=int, default=2, help="at least 2")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, layers=2, trials=2, seeds=2, max_new_tokens=10)
    if arguments.hidden_size < 64 or arguments.hidden_size % 64:
        raise ValueError(f"--hidden-size: must be a multiple of 64, got {arguments.hidden_size}")
    with tempfile.TemporaryDirectory() as folder:
        trials = compare(Path(folder), arguments)
    say(f"{arguments.layers} layers of {arguments.hidden_size}, {2 * arguments.layers} bits, one thread")
    for line in table(trials):
        say(line)
    return 0


def compare(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The trials of all seeds, as the comparison's journal has them. Raises: CommandError if it fails."""
    make_study(folder, arguments.layers, arguments.hidden_size, arguments.max_new_tokens)
    numbers = {"--trials": arguments.trials, "--checkpoints": arguments.trials, "--seeds": arguments.seeds}
    names = {"--study": folder, "--out": folder, "--strategies": "ours", "--confirm-repeats": 1}
    flags = [str(word) for pair in (names | numbers).items() for word in pair]
    command = [sys.executable, "-m", "search.compare", "--quiet", *flags]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError((done.stderr.splitlines() or ["search.compare failed"])[-1])
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()]


def make_study(folder: Path, num_layers: int, hidden_size: int, max_new_tokens: int) -> None:
    """A model with the demo's tokenizer, and study.toml."""
    random_llama(num_layers, hidden_size, engine="eager").model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(_DEMO / "model").save_pretrained(folder / "model")
    lines = {
        "model": "./model",
        "prompts": str(_DEMO / "tuning.jsonl"),
        "held_out": str(_DEMO / "held_out.jsonl"),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "max_new_tokens": max_new_tokens,
        "trial_seconds": 2.0,
    }
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())
    (folder / "study.toml").write_text(text, encoding="utf-8")


def table(trials: Sequence[dict[str, Any]]) -> list[str]:
    """Seconds of a proposal by where it came from. Apart: a run's first, which pays for all readings before it, and
    those before which the steps' costs were measured again."""
    groups: dict[str, list[float]] = {"first": [], "costs again": [], "all others": []}
    for trial in trials:
        seconds = trial["proposal_s"]
        if trial["number"] % RECHECK_EVERY == 0:
            groups["costs again" if trial["number"] else "first"].append(seconds)
            continue
        groups["all others"].append(seconds)
        groups.setdefault(trial["user_attrs"].get("origin", "failed").split()[0], []).append(seconds)
    lines = [f"{'seconds of':14} {'trials':>6} {'mean':>8} {'median':>8} {'95th':>8} {'most':>8}"]
    for name, found in groups.items():
        if not found:
            continue
        numbers = (float(np.mean(found)), *(float(np.quantile(found, share)) for share in (0.5, 0.95, 1.0)))
        lines.append(f"{name:14} {len(found):6} " + " ".join(f"{number:8.3f}" for number in numbers))
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
