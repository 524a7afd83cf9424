"""python -m studies.spec_bench.make_prompts QUESTIONS: prompts that a search chooses on, and others that report.

QUESTIONS is `data/spec_bench/question.jsonl` of Spec-Bench (Xia et al., 2024, https://github.com/hemingkx/Spec-Bench):
80 questions each of six tasks, one of them the first turns of MT-Bench in its eight categories. Of every task equally
many are drawn, the same ones each time, and the tasks take turns; no question is in both files. The held-out file has
twice as many, half of which choose among a search's finalists.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from layerskip.command_line.cli import OneLineParser, check_folders, check_least, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.prompts import Prompt, read_prompts
from search.study.grouping import NO_GROUPS

PROG = "studies.spec_bench.make_prompts"
OUT = Path(__file__).resolve().parent
MULTI_TURN = "multi-turn"
_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""As the file has them; its other categories are MT-Bench's."""
_SEED = 0


def by_task(questions: Sequence[Prompt]) -> dict[str, list[str]]:
    """Prompts as lines of a file, of each task. Raises: ValueError naming a line that is no question."""
    tasks = defaultdict(list)
    for one in questions:
        if one.kind != "turn":
            raise ValueError(f"{one.source}: must be a question of Spec-Bench, with turns")
        task = one.group if one.group in _TASKS else MULTI_TURN
        messages = [{"role": role, "content": content} for role, content in one.messages]
        tasks[task].append(json.dumps({"id": one.prompt_id, "category": task, "messages": messages}))
    return dict(tasks)


def split(tasks: Mapping[str, Sequence[str]], count: int) -> tuple[list[str], list[str]]:
    """Lines of the files, `count` of each task and twice as many. Raises: ValueError where a task has too few."""
    random, drawn = np.random.default_rng(_SEED), []
    for task, lines in sorted(tasks.items()):
        if len(lines) < 3 * count:
            raise ValueError(f"--per-task: {task} has {len(lines)} questions, too few for three times {count}")
        drawn.append([lines[place] for place in random.permutation(len(lines))[: 3 * count]])
    turns = [line for turn in zip(*drawn, strict=True) for line in turn]
    third = len(turns) // 3
    return turns[:third], turns[third:]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--per-task", type=int, default=8, help="questions of each task in the tuning file")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of tuning.jsonl and held_out.jsonl")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> int:
    check_least(arguments, per_task=1)
    check_folders(arguments, "out")
    tasks = by_task(read_prompts(arguments.questions, NO_GROUPS))
    for name, lines in zip(("tuning", "held_out"), split(tasks, arguments.per_task), strict=True):
        write_atomically(arguments.out / f"{name}.jsonl", "\n".join([*lines, ""]))
        sys.stdout.write(f"{name}.jsonl: {len(lines)} prompts\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
