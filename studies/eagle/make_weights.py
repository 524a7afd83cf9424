"""Trains draft weights for the demo model on its own sources: `python -m studies.eagle.make_weights`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from layerskip import train
from layerskip.command_line.cli import OneLineParser, run_command
from studies.demo import corpus

PROG = "studies.eagle.make_weights"
HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "demo"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Writes the modules that the demo model was trained on, none that its prompts come from, as one "
        "text; trains on that and on what the model itself says to the tuning prompts.",
    )
    parser.add_argument("--model", default=str(DEMO / "model"), help="the demo model or its stock twin")
    parser.add_argument("--out", type=Path, default=HERE / "weights", help="folder for the weights")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def training_files() -> list[Path]:
    """Writes the text; files for `layerskip.train --data`."""
    text = HERE / ".work" / "corpus.txt"
    text.parent.mkdir(exist_ok=True)
    modules = corpus.split_modules(corpus.read_modules()).train
    text.write_text(corpus.END_OF_TEXT.join(one.text for one in modules), encoding="utf-8")
    return [text, DEMO / "tuning.jsonl"]


def _run(arguments: argparse.Namespace) -> int:
    return train.main(
        [
            *("--model", arguments.model, "--out", str(arguments.out), "--device", "cpu"),
            *("--data", *map(str, training_files())),
            *("--minutes", str(arguments.minutes), "--threads", str(arguments.threads)),
            # Small batches: within minutes on a CPU more steps are worth more than smoother ones.
            *("--batch", "2", "--depth", "4"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
