"""The benchmark: `python -m studies.proving --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from layerskip.command_line.cli import OneLineParser, check_least, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.machine.host import git_commit
from search.compact import write_lines
from search.comparison.journal import Journal
from search.rivals import STRATEGIES
from search.rivals.registry import OURS
from studies.proving.ablations import ABLATIONS, AT_HALF_AND_DOUBLE
from studies.proving.costs import COSTS
from studies.proving.jobs import Job, in_turns, scores_of
from studies.proving.make import READINGS, SUFFIX
from studies.proving.optima import known_optima, table_names
from studies.proving.runner import Case
from studies.proving.scores import Mean, Score, by_costs, summarise, table_of, to_json
from studies.proving.table import Table
from studies.proving.tabular import Noise
from studies.results import command_of

PROG = "studies.proving"
CHECKPOINTS = (1, 5, 25, 100, 200)
RUNS = ".runs.jsonl.xz"
"""Ends the name of the file beside the output that holds every run."""
TRIALS = 25
SEEDS = 3
DEFAULT_STRATEGIES = (
    OURS,
    *(f"{name}{more}" for name in ("layerskip", "draft-verify", "random") for more in ("", "+settings")),
    *(f"{name}+settings" for name in ("del", "swift", "clasp", "knapspec", "leave-one-out")),
    "raw-tpe",
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Run search strategies on tables of readings, where a config's worth is known exactly, and print "
        "how far from the best their choices are on prompts that none of them sees. With --out the same command goes "
        "on where it was stopped. Exit codes: 0 done, 2 bad input.",
    )
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help="tables to run on [all that are there]")
    add("--costs", nargs="+", choices=sorted(COSTS), default=list(COSTS), help="machines [all]")
    add(
        "--strategies",
        nargs="+",
        type=_strategy,
        metavar="NAME",
        default=list(DEFAULT_STRATEGIES),
        help=f"who proposes, of {', '.join(STRATEGIES)}, or {OURS}:PART[+PART] without these parts of it, of "
        f"{', '.join(ABLATIONS)}, or with a constant at half or double, as in {next(iter(AT_HALF_AND_DOUBLE))}",
    )
    add("--seeds", type=int, default=SEEDS, help=f"runs of each, seeds 0, 1, ... [{SEEDS}]")
    add("--trials", type=int, default=TRIALS, help=f"of each run [{TRIALS}]")
    add("--ablations", action="store_true", help="ours with each of its parts left out, instead of --strategies")
    add("--constants", action="store_true", help="ours with each of its constants at half and double, likewise")
    add("--processes", type=int, default=2, help="runs at a time [2]")
    add("--noise", type=float, default=6.0, help="of a pair's ratio, in per cent [6]")
    add("--drift", type=float, default=10.0, help="swing of what verifying costs, in per cent [10]")
    add("--burst", type=float, default=10.0, help="of all verifications timed in one go, in per cent [10]")
    add("--readings", type=Path, default=READINGS, help="folder of the tables [studies/proving/readings]")
    add("--save-optima", action="store_true", help="keep optima that had to be enumerated beside the tables")
    add("--out", type=Path, help="JSON file of every run's scores and their means")
    return parser.parse_args(argv)


def _strategy(text: str) -> str:
    name, colon, parts = text.partition(":")
    if name not in STRATEGIES or (
        colon and (name != OURS or not set(parts.split("+")) <= {*ABLATIONS, *AT_HALF_AND_DOUBLE})
    ):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(STRATEGIES)}, or {OURS}: and parts of {', '.join(ABLATIONS)}, got {text}"
        )
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    args = parse(argv)
    args.command = sys.argv[1:] if argv is None else list(argv)
    return run_command(PROG, lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> int:
    """What `main` does. Raises: ValueError or OSError in one line for bad input."""
    check_least(args, seeds=1, trials=1, processes=1)
    for name in ("noise", "drift", "burst"):
        if not 0.0 <= getattr(args, name) < 100.0:
            raise ValueError(f"--{name}: must be from 0 to below 100 per cent, got {getattr(args, name):g}")
    commit = git_commit(Path(__file__).parent)  # now: by the end there may be changes
    noise = Noise(args.noise / 100, args.drift / 100, args.burst / 100)
    tables = load_tables(args.readings, args.models)
    optima = known_optima(args.readings, tables, saves=args.save_optima, tell=lambda name: _say(f"{name}: enumerating"))
    checkpoints = tuple(sorted({one for one in CHECKPOINTS if one < args.trials} | {args.trials}))
    parts = [*(ABLATIONS if args.ablations else ()), *(AT_HALF_AND_DOUBLE if args.constants else ())]
    strategies = [OURS, *(f"{OURS}:{part}" for part in parts)] if parts else args.strategies
    jobs = [
        Job(Case(model, table, COSTS[costs], strategy, seed, args.trials, noise), optima[model][costs], checkpoints)
        for model, table in tables.items()
        for costs in args.costs
        for seed in range(args.seeds)
        for strategy in strategies
    ]
    command = command_of(PROG, args.command)
    journal = None if args.out is None else Journal(args.out.with_suffix(".runs.jsonl"))
    scores = finished_runs(journal, {"command": command, "commit": commit})
    for score in scores_of(in_turns(jobs, args.processes)[len(scores) :], args.processes):
        scores.append(score)
        if journal is not None:
            journal.append(asdict(score))
        _say(_line(score))
    summary = summarise(scores)
    least = Mean.over_models(scores, lambda one: one.tuning_regret)
    sys.stdout.write(f"{table_of(summary)}\n\nThe best config by all tuning texts, without noise: regret {least} %\n")
    if args.out is not None:
        facts = {
            "commit": commit,
            "command": command,
            "noise": asdict(noise),
            "trials": args.trials,
            "seeds": args.seeds,
            "num_reporting": {name: len(table.reporting) for name, table in tables.items()},
            "tuning_regret": vars(least),
            "means": to_json(summary),
        }
        if len(args.costs) > 1:
            facts["means_by_costs"] = {name: to_json(summarise(some)) for name, some in by_costs(scores).items()}
        write_lines(args.out.with_suffix(RUNS), [asdict(one) for one in scores])
        write_atomically(args.out, json.dumps(facts) + "\n")
    if journal is not None:
        journal.path.unlink()
    return 0


def finished_runs(journal: Journal | None, made_by: dict[str, str | None]) -> list[Score]:
    """What the same command has finished before it was stopped, in order; a journal of another one is begun anew."""
    if journal is None:
        return []
    first, *lines = journal.read() or [None]
    if first != made_by:
        journal.path.unlink(missing_ok=True)
        journal.append(made_by)
        return []
    if lines:
        _say(f"{len(lines)} runs are there already")
    return [
        Score(**{**one, "regrets": {int(count): value for count, value in one["regrets"].items()}}) for one in lines
    ]


def load_tables(folder: Path, names: Sequence[str] | None) -> dict[str, Table]:
    """The tables of a folder, or these of them. Raises: ValueError for one that is not there."""
    there = table_names(folder, SUFFIX)
    if missing := sorted(set(names or ()) - set(there)):
        raise ValueError(f"--models: must be among {', '.join(there) or 'none'} in {folder}, got {missing[0]}")
    if not there:
        raise ValueError(f"--readings: no table in {folder}; make them with python -m studies.proving.make")
    return {name: Table.load(folder / f"{name}{SUFFIX}") for name in names or there}


def _line(one: Score) -> str:
    regrets = ", ".join(f"{regret:.1f} after {count}" for count, regret in one.regrets.items())
    name = f"{one.model} {one.costs} {one.strategy} {one.seed}"
    return f"{name}: optimum {one.optimum:.3f}x, regret {regrets}, exported {one.regret:.1f}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
