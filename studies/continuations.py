"""python -m studies.continuations: what it is worth to continue each tuning prompt more than once when sampling.

Lookups of the search's grid are predicted, by replay and at the study's costs, on many sampled continuations of tuning
and of held-out prompts. The one that is best on a few tuning continuations is held against the best there is on all
held-out ones: its regret. No clock is in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.sampling_regime import Sampling
from layerskip.machine.host import git_commit
from search.measure.pairs import PromptCase
from search.measure.reference import Continuing, make_cases
from search.measure.subject import Subject
from search.predict.costs import CostModel
from search.predict.predictor import Predictor, lookup_grid
from search.predict.replay import Settings, TextRows
from search.regime_run import regime_study
from search.study.prompts import load_prompts
from search.study.spec import load_spec
from studies.results import run_study, write_json

METHODS = ("prompt_lookup", "suffix")
_DRAWS = 200
"""Of prompts and continuations, for each row of the table."""
Floats = NDArray[np.float64]


def log_speedups(subject: Subject, case_sets: Sequence[Sequence[PromptCase]], cost: CostModel, length: int) -> Floats:
    """(lookups of the grid, sets, prompts): predicted log speedups."""
    found = []
    for cases in case_sets:
        forcing = subject.decoder.teacher_forcing([case.text for case in cases])
        rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), length)
        predictor = Predictor(forcing, rows, cost)
        grids = [Settings.of_lookups(lookup_grid(one, subject.space.lookup_gamma_max)) for one in METHODS]
        found.append(np.concatenate([predictor.log_speedups_by_text(grid) for grid in grids]))
    return np.stack(found, axis=1)


def regrets(
    tuning: Floats, held_out: Floats, num_prompts: int, num_continuations: int, rng: np.random.Generator
) -> dict[str, float]:
    """Of the lookup that is best on so many continuations each of so many tuning prompts: shares of speed.

    tuning, held_out: see `log_speedups`.
    """
    truth = held_out.mean(axis=(1, 2))
    found = []
    for _ in range(_DRAWS):
        prompts = rng.permutation(tuning.shape[2])[:num_prompts]
        seen = np.stack([tuning[:, rng.permutation(tuning.shape[1])[:num_continuations], one] for one in prompts])
        found.append(truth.max() - truth[seen.mean(axis=(0, 2)).argmax()])
    low, high = np.quantile(found, (0.025, 0.975))
    return {name: float(-np.expm1(-one)) for name, one in (("mean", np.mean(found)), ("low", low), ("high", high))}


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog="python -m studies.continuations", description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("studies/demo"), help="folder of a finished study")
    parser.add_argument("--regime", default="t0.7", help="one of its regimes, sampled (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="of each file (default: %(default)s)")
    parser.add_argument("--continuations", type=int, default=16, help="of each prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    return run_study("studies.continuations", parser, _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, prompts=4, continuations=2)
    from search.preflight import open_subject

    spec, paths = load_spec({}, str(arguments.study), demo=arguments.study)
    spec, folder = regime_study(spec, paths, Sampling.parse(arguments.regime).name)
    subject = open_subject(spec, paths, load_prompts(spec.prompts, spec.held_out))
    costs = json.loads(folder.summary.read_text(encoding="utf-8"))["costs"]["last"]
    cost = CostModel.parse(json.dumps(costs))
    sides: list[Floats] = []
    for prompts in (subject.tuning, subject.held_out):
        each = [Continuing(subject.space.num_layers, spec.seed, number) for number in range(arguments.continuations)]
        made = [make_cases(subject.decoder, prompts[: arguments.prompts], one) for one in each]
        too_short = {prompt_id for _, dropped in made for prompt_id in dropped}
        case_sets = [[case for case in cases if case.prompt_id not in too_short] for cases, _ in made]
        sides.append(log_speedups(subject, case_sets, cost, spec.max_new_tokens))
    rng = np.random.default_rng(spec.seed)
    most_prompts, most = sides[0].shape[2], sides[0].shape[1]
    rows: list[dict[str, Any]] = [
        {"num_prompts": prompts, "num_continuations": count} | regrets(*sides, prompts, count, rng)
        for prompts in (most_prompts // 4, most_prompts // 2, most_prompts)
        for count in (1, 2, 4, 8)
        if count <= most
    ]
    result = {
        "command": arguments.command,
        "commit": git_commit(Path(__file__).parent),
        "regime": arguments.regime,
        "best_held_out": float(np.exp(sides[1].mean(axis=(1, 2)).max())),
        "rows": rows,
    }
    if arguments.out is not None:
        write_json(arguments.out, result)
    for row in rows:
        sys.stdout.write(
            f"{row['num_prompts']:3} prompts x {row['num_continuations']}: {100 * row['mean']:.2f} % "
            f"({100 * row['low']:.2f}..{100 * row['high']:.2f}) below the best on held-out text\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
