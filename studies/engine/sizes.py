"""python -m studies.engine.sizes: where plain decoding stands at several sizes, dtypes and numbers of threads."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from layerskip import LayerSkipModel
from layerskip.analysis.step_times import StepTimer
from layerskip.benchmark.run import Plan, run_benchmark
from layerskip.command_line.cli import OneLineParser, check_folders, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import ENGINE_NAMES
from studies.engine.random_models import random_llama, random_text
from studies.engine.results import FOLDER, markdown_table, say, write_study

PROG = "studies.engine.sizes"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROWS = ("hf_generate", "plain")
_VERIFIED = (1, 2, 4, 8)
_CONTEXT = 32
_NEW_TOKENS = 24


def measure(model: LayerSkipModel, repeats: int, num_prompts: int) -> dict[str, Any]:
    """Rows and plain step as `layerskip.bench` measures them, and verification by tokens, beside them."""
    prompts = [(f"random-{seed}", random_text(_CONTEXT, seed)) for seed in range(num_prompts)]
    found = run_benchmark(model, None, prompts, Plan(_NEW_TOKENS, repeats, _ROWS))
    return {
        "engine": model.engine_name,
        "rows": found.rows,
        "step": None if found.steps is None else found.steps["target"][0],
        "bandwidth_bytes_per_s": None if found.steps is None else found.steps["bandwidth_bytes_per_s"],
        "attained": None if found.steps is None else found.steps["attained"]["plain"],
        "forward_share": None if found.forward_share is None else found.forward_share["plain"],
        "verify": verify_ratios(model, repeats),
    }


def verify_ratios(model: LayerSkipModel, repeats: int) -> dict[str, float]:
    """A target forward over n tokens over that of one, by n: the median of pairs."""
    timer, text = StepTimer(model, max(_VERIFIED)), random_text(_CONTEXT + _NEW_TOKENS // 2)
    shots = [timer.verify_s(text, _VERIFIED) for _ in range(4 * repeats + 1)][1:]
    return {str(n): statistics.median(one[i] / one[0] for one in shots) for i, n in enumerate(_VERIFIED)}


def table(results: list[dict[str, Any]]) -> str:
    """One line a model, dtype and number of threads; speeds in tokens/s."""
    header = ["hidden", "dtype", "threads", "engine", "generate", "plain", "ratio (95 %)", "identical", "ms a step"]
    header += ["of the bandwidth", *(f"verify {n}" for n in _VERIFIED[1:])]
    lines = []
    for one in results:
        reference, plain = one["rows"]
        line = [str(one["hidden_size"]), one["dtype"], str(one["num_threads"]), one["engine"]]
        line += [f"{reference['tokens_per_s']:.1f}", f"{plain['tokens_per_s']:.1f}", _ratio(plain["vs_hf_generate"])]
        line += [f"{plain['identical']}/{plain['num_outputs']}" + (f" +{plain['ties']} ties" if plain["ties"] else "")]
        line += [f"{1000 * one['step']['seconds']:.2f}", f"{one['step']['bandwidth_share']:.0%}"]
        lines.append(line + [f"{one['verify'][str(n)]:.2f}" for n in _VERIFIED[1:]])
    return markdown_table(header, lines)


def _ratio(against: dict[str, Any]) -> str:
    interval = "" if against["ci_low"] is None else f" ({against['ci_low']:.2f}..{against['ci_high']:.2f})"
    return f"{against['ratio']:.2f}{interval}"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048], help="hidden sizes")
    parser.add_argument("--layers", type=int, default=4, help="of every model: few, so that the largest fits")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--engine", choices=ENGINE_NAMES, default="auto", help="how a forward is executed")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of every row and prompt")
    parser.add_argument("--prompts", type=int, default=4, help="random prompts")
    parser.add_argument("--quick", action="store_true", help="one tiny model on one thread, for a test")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for sizes.json and sizes.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    quiet_libraries()
    sizes, threads = ([64], [1]) if arguments.quick else (arguments.sizes, arguments.threads)
    results = []
    for hidden_size in sizes:
        for dtype in arguments.dtypes:
            for num_threads in threads:
                torch.set_num_threads(num_threads)
                # Made anew: which engine is the faster one may depend on the threads.
                model = random_llama(arguments.layers, hidden_size, dtype=_DTYPES[dtype], engine=arguments.engine)
                kind = {"hidden_size": hidden_size, "dtype": dtype, "num_threads": num_threads}
                results.append(kind | measure(model, arguments.repeats, arguments.prompts))
                say(table(results[-1:]).splitlines()[-1])
    record = {
        "num_layers": arguments.layers,
        "max_new_tokens": _NEW_TOKENS,
        "prompt_tokens": _CONTEXT,
        "num_prompts": arguments.prompts,
        "repeats": arguments.repeats,
        "results": results,
    }
    write_study(arguments.out, "sizes", record, table(results))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_least(arguments, sizes=1, threads=1, layers=1, repeats=1, prompts=1)
    check_folders(arguments, "out")


if __name__ == "__main__":
    raise SystemExit(main())
