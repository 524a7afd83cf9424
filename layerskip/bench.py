"""python -m layerskip.bench --config best.json: Hugging Face's ways to decode, ours, and where the time goes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.benchmark.names import ALL_ROWS, ROW_NAMES
from layerskip.command_line.by_hand import add_setting_arguments, setting_by_hand
from layerskip.command_line.cli import CommandError, OneLineParser, check_least, print_error, run_command
from layerskip.command_line.command_model import add_model_arguments, load_model, max_new_tokens, read_config
from layerskip.config.decode_config import DecodeConfig, number_format, write_atomically
from layerskip.config.lossy_acceptance import lossy_label
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.strict_json import in_six_digits
from layerskip.config.usual_lookups import NUM_TOKENS

if TYPE_CHECKING:
    from layerskip.benchmark.profiling import StepProfile
    from layerskip.benchmark.run import Benchmark
    from layerskip.model import LayerSkipModel

PROG = "layerskip.bench"
HELD_OUT = "held_out.jsonl"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    add_model_arguments(parser)
    add_setting_arguments(parser)
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"prompts as JSONL; default: {HELD_OUT} beside the config"
    )
    what.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    what.add_argument("--num-prompts", type=int, default=8, help="the first so many of the file")
    what.add_argument("--repeats", type=int, default=3, help="timed runs of every row and prompt")
    what.add_argument("--only", action="append", metavar="NAME", choices=ALL_ROWS, help=f"one of {', '.join(ALL_ROWS)}")
    what.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="run hf_generate_compiled; default: on a GPU, for on a CPU it compiles for half a minute and more",
    )
    what.add_argument("--profile", action="store_true", help="also print the costliest operations of each step")
    what.add_argument("--json", type=Path, metavar="FILE", help="write everything measured, every repeat included")
    what.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart as an HTML page")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    config, by_hand = read_config(arguments), setting_by_hand(arguments)
    prompts_file = _prompts_file(arguments)
    model = load_model(arguments, config, looks_for_config=by_hand is None)
    if by_hand is not None:
        model.config = by_hand(model.num_layers)
    has_setting = config is not None or by_hand is not None
    own = model.config.for_sampling(SamplingParams())  # every row is greedy
    config = own if own.speculates or has_setting else None
    new_tokens = max_new_tokens(arguments, config)
    longest_draft = NUM_TOKENS if config is None else max(NUM_TOKENS, config.max_gamma)
    prompts = _prompts(model, arguments, prompts_file, new_tokens + longest_draft)
    benchmark, profiles = _measure(model, config, prompts, new_tokens, arguments)
    facts = benchmark.facts | {"prompts_file": None if prompts_file is None else prompts_file.name}
    facts["regime"] = None if config is None or config.sampling is None else config.sampling.name
    facts["lossy"] = None if config is None or config.lossy is None else lossy_label(config.lossy)
    if arguments.json is not None:
        record = in_six_digits(_record(benchmark, profiles, facts))
        write_atomically(arguments.json, json.dumps(record, separators=(",", ":")) + "\n")
    if arguments.plot is not None:
        from layerskip.benchmark.report import write_plot

        write_plot(arguments.plot, benchmark.rows, _facts_line(facts))
    _print(benchmark, profiles, facts)
    for name in benchmark.broken:
        print_error(PROG, f"{name}: output differs from Hugging Face's: please report this as a bug")
    return 1 if benchmark.broken else 0


def _check(arguments: argparse.Namespace) -> None:
    """What can be refused before a model is loaded."""
    check_least(arguments, repeats=1, num_prompts=1, max_new_tokens=1)
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"no such folder: {path.absolute().parent}")
    if arguments.prompts is not None and arguments.prompt:
        raise ValueError("--prompts, --prompt: give one of them, not both")


def _prompts_file(arguments: argparse.Namespace) -> Path | None:
    """The file to read; None with --prompt."""
    if arguments.prompt:
        return None
    if arguments.prompts is not None:
        path: Path = arguments.prompts
    elif arguments.config is not None and (arguments.config.parent / HELD_OUT).is_file():
        path = arguments.config.parent / HELD_OUT
    else:
        raise ValueError(f"--prompts: is required, or --prompt: there is no {HELD_OUT} beside a config to fall back on")
    if not path.is_file():
        raise ValueError(f"--prompts: no such file: {path}")
    return path


def _prompts(
    model: LayerSkipModel, arguments: argparse.Namespace, file: Path | None, room: int
) -> list[tuple[str, tuple[int, ...]]]:
    from layerskip.prompts import Prompt, encode_prompt, read_prompts

    if file is None:
        prompts = [
            Prompt(f"prompt-{i}", None, "text", (("user", text),), f"--prompt {i}")
            for i, text in enumerate(arguments.prompt, start=1)
        ]
    else:
        prompts = list(read_prompts(file))[: arguments.num_prompts]
    return [(prompt.prompt_id, encode_prompt(prompt, model, room=room)) for prompt in prompts]


def _measure(
    model: LayerSkipModel,
    config: DecodeConfig | None,
    prompts: list[tuple[str, tuple[int, ...]]],
    new_tokens: int,
    arguments: argparse.Namespace,
) -> tuple[Benchmark, list[StepProfile]]:
    from rich.progress import Progress

    from layerskip.benchmark.run import Plan, run_benchmark
    from layerskip.benchmark.ways import CannotRun

    every_row = ROW_NAMES if config is None or config.lossy is None else ALL_ROWS
    plan = Plan(new_tokens, arguments.repeats, arguments.only or every_row, arguments.compile)
    try:
        console = _console()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("measuring", total=len(prompts) * arguments.repeats)
            benchmark = run_benchmark(model, config, prompts, plan, progress=lambda: progress.advance(task))
    except CannotRun as error:
        raise CommandError(f"Hugging Face's generate cannot decode this model: {error}") from None
    if not arguments.profile:
        return benchmark, []
    from layerskip.benchmark.profiling import profile_steps

    return benchmark, profile_steps(model, config or DecodeConfig.plain(model.num_layers), benchmark.cases[0])


def _record(benchmark: Benchmark, profiles: list[StepProfile], facts: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema_version": 2,
        "rows": benchmark.rows,
        "steps": benchmark.steps,
        "forward_share": benchmark.forward_share,
        "facts": facts,
        "machine": benchmark.machine,
        "profile": [asdict(one) for one in profiles],
    }


def _facts_line(facts: dict[str, Any]) -> str:
    tuned = "" if facts["regime"] is None else f"; the config's setting for {facts['regime']}"
    numbers = number_format(facts["dtype"], facts["quantization"])
    lossy = "" if facts["lossy"] is None else f"; row lossy: {facts['lossy']}"
    return (
        f"{facts['model_class']}, {facts['num_layers']} layers, {numbers} on {facts['device']}, "
        f"{facts['num_threads']} threads, engine {facts['engine']}; {facts['num_prompts']} prompts × "
        f"{facts['repeats']} repeats × {facts['max_new_tokens']} tokens, batch 1, greedy{tuned}{lossy}"
    )


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, markup=False, stderr=True)


def _print(benchmark: Benchmark, profiles: list[StepProfile], facts: dict[str, Any]) -> None:
    from rich.console import Console

    from layerskip.benchmark.report import print_profiles, print_rows, print_steps
    from layerskip.machine.watch import describe_machine

    # A pipe or a file has no width; 80 columns would break the intervals off.
    console = Console(highlight=False, markup=False, file=sys.stdout, width=None if sys.stdout.isatty() else 130)
    console.print(_facts_line(facts), soft_wrap=True)
    console.print(describe_machine(benchmark.machine), soft_wrap=True)
    print_rows(console, benchmark.rows)
    if benchmark.steps is not None:
        print_steps(console, benchmark.steps, benchmark.forward_share or {})
    print_profiles(console, profiles)


if __name__ == "__main__":
    sys.exit(main())
