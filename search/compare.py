"""python -m search.compare: every published way to choose a mask, on the same budget, engine, prompts and seeds."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from layerskip.command_line.cli import OneLineParser, print_error, quiet_libraries, run_command, split_list
from layerskip.huggingface.device_map import refuse_torchrun
from search.command_line import add_output_flags, demo_folder
from search.stop import StopSignal
from search.study.spec import StudyPaths, StudySpec, load_spec

if TYPE_CHECKING:
    from search.comparison.plan import ComparisonPlan
    from search.context import Tools
    from search.terminal.reporter import Reporter

PROG = "search.compare"
_CHECKPOINTS = (5, 10, 25)
_EPILOG = """\
Each strategy runs once per seed; the runs take turns of three trials, so that drift of the machine hits all alike. At
each checkpoint the leader of every run is confirmed on held-out prompts. N-grams as usually set, looked up in the text
so far without mask and search, are confirmed beside them and have a row of their own: what any mask has to beat.
A strategy NAME chooses masks and settings as published (see --departures); NAME+settings chooses the same masks and
measures each at the gamma and thresholds that our predictor holds best for it. All measure a leader again as often as
ours.
Written to --out: results.json, table.md, plot.html, record.jsonl.xz (what these three are computed from, small enough
to be committed), and the journals from which the same command goes on after a stop. More trials, seeds or strategies
may be asked for later; what is measured stays. --tables makes the three from the record again. Exit codes: 0 done, 1
outputs were not lossless, 2 bad input, 130 and 143 stopped by a signal."""


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--study", help="study folder, or its study.toml; the demo without it")
    parser.add_argument("--strategies", metavar="A,B", help="which ones; all that the engine allows without it")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs per strategy, at least 2 (5)")
    parser.add_argument("--trials", type=int, default=25, metavar="N", help="measured trials per run (25)")
    parser.add_argument("--checkpoints", metavar="A,B", help="numbers of trials to confirm after (5,10,25)")
    parser.add_argument("--confirm-repeats", type=int, metavar="N", help="passes over the held-out prompts")
    parser.add_argument("--out", help="folder of the results; STUDY/compare without it")
    parser.add_argument(
        "--tables", action="store_true", help="make the results in --out from its record again; measures nothing"
    )
    parser.add_argument(
        "--departures", action="store_true", help="print where each strategy departs from its paper, and exit"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what it would take, write nothing")
    add_output_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    refuse_torchrun("start it as one process")
    if arguments.departures:
        from search.rivals import departures_table

        sys.stdout.write(departures_table())
        return 0
    # Strategies choose masks and their settings: ours may look nothing up either. N-grams are a row of their own.
    spec, paths = load_spec({"drafters": ("layer_skip",)}, arguments.study, demo=demo_folder())
    out = Path(arguments.out).expanduser() if arguments.out else paths.folder / "compare"
    if arguments.tables:
        return _write_tables(out)
    plan = make_plan(arguments, spec)
    from search.context import Tools

    stop = StopSignal()
    with stop.installed():
        try:
            tools = partial(Tools, stop=stop, command=shlex.join(["python", "-m", PROG, *argv]))
            return _compare(plan, (spec, paths), out, tools, arguments)
        except KeyboardInterrupt:
            print_error(PROG, f"stopped; the same command goes on with what is in {out}")
            return stop.exit_code


def make_plan(arguments: argparse.Namespace, spec: StudySpec) -> ComparisonPlan:
    """The flags as a plan; seeds count up from the study's. Raises: ValueError in one line."""
    from search.comparison.plan import ComparisonPlan
    from search.rivals import STRATEGIES

    names = tuple(STRATEGIES) if arguments.strategies is None else split_list(arguments.strategies)
    if arguments.checkpoints is None:
        trials = arguments.trials
        checkpoints = (*(one for one in _CHECKPOINTS if one < trials), trials)
    else:
        checkpoints = tuple(_whole("--checkpoints", text) for text in split_list(arguments.checkpoints))
    return ComparisonPlan(
        strategies=names,
        seeds=tuple(range(spec.seed, spec.seed + max(arguments.seeds, 0))),
        trials=arguments.trials,
        checkpoints=checkpoints,
        confirm_repeats=spec.confirm_repeats if arguments.confirm_repeats is None else arguments.confirm_repeats,
    )


def _compare(
    plan: ComparisonPlan,
    study: tuple[StudySpec, StudyPaths],
    out: Path,
    tools: Callable[[Reporter], Tools],
    arguments: argparse.Namespace,
) -> int:
    from search.comparison.pipeline import ComparisonRun, as_before
    from search.comparison.plan import estimate
    from search.preflight import open_subject
    from search.storages.opening import check_writable
    from search.study.prompts import load_prompts
    from search.terminal.live import make_reporter

    spec, paths = study
    prompt_sets = load_prompts(spec.prompts, spec.held_out)
    if not arguments.dry_run:
        check_writable(out)
    quiet_libraries()
    with make_reporter(quiet=arguments.quiet, json_lines=arguments.json) as reporter:
        subject = open_subject(as_before(spec, out), paths, prompt_sets)
        reporter.phase("plan", estimate(plan, subject, spec))
        if arguments.dry_run:
            reporter.phase("dry run", "nothing was written")
            return 0
        run = ComparisonRun(plan, subject, spec, out, tools(reporter))
        return run.run(named=arguments.strategies is not None)


def _write_tables(out: Path) -> int:
    from search.comparison.record import FILE, read_record, write_results
    from search.study.opening import quiet_optuna

    quiet_optuna()
    file = out / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a comparison that reaches its end writes it")
    sys.stdout.write(write_results(read_record(file), out))
    return 0


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{flag}: must be whole numbers, got {text!r}") from None


if __name__ == "__main__":
    raise SystemExit(main())
