"""python -m studies.lossy: what lossy rules are worth on a finished study, and how far they lead from the target."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command, split_list
from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.machine.host import cpu_name, git_commit
from layerskip.machine.watch import MachineWatch, describe_machine
from layerskip.model import LayerSkipModel
from search.confirm.lossy import measure_ladder
from search.measure.decoder import ModelDecoder
from search.regime_run import regime_study
from search.study.prompts import EncodedPrompt, encode_prompts, load_prompts
from search.study.spec import load_spec
from studies.engine.results import markdown_table
from studies.regimes import REGIMES, ways_in

WAYS = ("exported", "best layer_skip")
_NAMES = ("greedy", "t0.7")
_HEADER = (
    "rule",
    "times plain (95 %)",
    "times the lossless one (95 %)",
    "tokens unlike",
    "log-probability a token",
    "of the target's text",
    "outputs identical",
)


def measure(
    decoder: ModelDecoder, ways: Mapping[str, DecodeConfig], prompts: Sequence[EncodedPrompt]
) -> dict[str, dict[str, Any]]:
    """Of each way its setting and the rungs. Cost: six decodings of each prompt, and eight forwards over it."""
    return {
        name: {
            "config": way.model_dump(mode="json", exclude_none=True),
            "rungs": [one.to_dict() for one in measure_ladder(decoder, prompts, way, 0)],
        }
        for name, way in ways.items()
    }


def table(rungs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each rule."""
    rows = []
    for one in rungs:
        confirmed, against = one["confirmed"], one["against_lossless"]
        distance = confirmed["distance"]
        rows.append(
            (
                one["rule"],
                f"{confirmed['speedup']:.2f} ({confirmed['speedup_ci_low']:.2f}..{confirmed['speedup_ci_high']:.2f})",
                f"{against['speedup']:.2f} ({against['ci_low']:.2f}..{against['ci_high']:.2f})",
                f"{distance['unlike_share']:.1%}",
                f"{distance['log_prob']:.3f}",
                f"{distance['target_log_prob']:.3f}",
                f"{confirmed['num_identical']} of {confirmed['num_prompts']}",
            )
        )
    return markdown_table(_HEADER, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = OneLineParser(prog="python -m studies.lossy", description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("studies/demo"), help="its folder")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts, the first so many")
    parser.add_argument("--regimes", type=split_list, default=_NAMES, metavar="LIST", help=f"of {', '.join(_NAMES)}")
    parser.add_argument("--tokens", type=int, help="new tokens in every regime")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    arguments = parser.parse_args(given)
    return run_command("studies.lossy", lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    check_least(arguments, prompts=2)
    if unknown := set(arguments.regimes) - set(_NAMES):
        raise ValueError(f"--regimes: must be of {', '.join(_NAMES)}, got {', '.join(unknown)}")
    quiet_libraries()
    import torch

    spec, paths = load_spec({}, str(arguments.study), demo=arguments.study)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    model = LayerSkipModel.from_config(paths.best, allow_lossy=True)
    firsts = {one.sampling.name: one for one in reversed(REGIMES)}
    regimes = [firsts[name] for name in arguments.regimes]
    regimes = [replace(one, max_new_tokens=arguments.tokens or one.max_new_tokens) for one in regimes]
    files = {name: regime_study(spec, paths, name)[1].summary for name in model.config.regime_names}
    summaries = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    room = max(one.max_new_tokens for one in regimes)
    held_out = encode_prompts(load_prompts(spec.prompts, spec.held_out)[1], model, room=room)[: arguments.prompts]
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "studies.lossy", *argv]),
        "commit": git_commit(Path(__file__).parent),
        "cpu": cpu_name(),
        "engine": model.engine_name,
        "num_threads": torch.get_num_threads(),
        "machine": {},
        "regimes": {},
    }
    for regime in regimes:
        ways = {name: way for name, way in ways_in(regime, model.config, summaries).items() if name in WAYS}
        decoder = ModelDecoder(model, regime.max_new_tokens, regime.sampling.params())
        measure(decoder, ways, held_out[:1])  # allocators, caches and kernels settle
        watch = MachineWatch(model)
        found = measure(decoder, ways, held_out)
        result["regimes"][regime.name] = found
        result["machine"][regime.name] = describe_machine(watch.record())
        for name, one in found.items():
            sys.stdout.write(f"\n{regime.name}, {name}, LOSSY:\n\n{table(one['rungs'])}")
        sys.stdout.flush()
        if arguments.out is not None:  # each regime at once: a run that is cut off keeps what it has
            write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
