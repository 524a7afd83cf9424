"""python -m studies.engine.draft_bits: what rounding the draft weights of a study to 8 bits gains and loses.

On a CPU with compiled sublayers trained layers and smaller models draft with 8-bit copies of their weights. Here the
same weights draft so and as they are, in turns, on the study's held-out prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.draft_weights import describe_weights
from layerskip.engines.native.layers import NativeLayers
from search.measure.decoder import ModelDecoder, load_model
from search.study.prompts import encode_prompts, load_prompts
from search.study.spec import load_spec
from studies.engine.siblings import REGIMES, timed
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say

PROG = "studies.engine.draft_bits"


def config_of(model: LayerSkipModel, weights: DraftWeights, gamma: int) -> DecodeConfig:
    """Chains of these weights, which are loaded then."""
    none = SkipMask.none(model.num_layers)
    config = DecodeConfig(drafter=weights.drafter, skip_mask=none, gamma=gamma, draft_weights=weights)
    model.check_config(config)
    return config


def table(record: Mapping[str, Any]) -> str:
    """Regime and draft weights a row."""
    rows = []
    for one in record["rows"]:
        whole, rounded = one["ways"]
        ends = rounded["over_none"]["interval"]
        ratio = f"{rounded['over_none']['mean']:.3f}" + ("" if ends is None else f" ({ends[0]:.3f}..{ends[1]:.3f})")
        lengths, speedups = ([f"{way[name]:.2f}" for way in (whole, rounded)] for name in ("length", "speedup"))
        identical = f"{rounded['num_identical']} of {rounded['num_outputs']}"
        rows.append([f"{one['drafter']}, {one['regime']}", *lengths, *speedups, ratio, identical])
    header = (
        "draft weights, text",
        "tokens a round",
        "in 8 bits",
        "speedup",
        "in 8 bits",
        "8 bits over whole",
        "identical",
    )
    return markdown_table(header, rows)


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDIES / "smollm2" / "trained", help="with draft weights")
    parser.add_argument("--dtype", help="number format (default: the study's)")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, gamma=1, prompts=1, repeats=1)
    check_out(arguments.out)
    changes = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    spec, _ = load_spec(changes, str(arguments.study), demo=arguments.study)
    if not spec.draft_weights:
        raise ValueError(f"--study: must name draft_weights, {arguments.study} has none")
    rounded = load_model(spec)
    if (refusal := NativeLayers.refusal(rounded.adapter.device, rounded.adapter.dtype)) is not None:
        raise ValueError(f"kernels: needed to draft in 8 bits: {refusal}")
    whole = LayerSkipModel(rounded.model, rounded.tokenizer, engine=rounded.engine_name)
    new_tokens = spec.max_new_tokens
    held_out = load_prompts(spec.prompts, spec.held_out)[1]
    prompts = [one.ids for one in encode_prompts(held_out, rounded, room=new_tokens)[: arguments.prompts]]
    record = facts(arguments.command) | {"dtype": spec.dtype, "num_threads": spec.num_threads, "rows": []}
    for weights in map(describe_weights, spec.draft_weights):
        config = config_of(rounded, weights, arguments.gamma)
        with mock.patch.object(NativeLayers, "rounded", lambda self, _bits: self):  # what is made now stays as it is
            config_of(whole, weights, arguments.gamma)
            ModelDecoder(whole, new_tokens, REGIMES["greedy"]).decode(prompts[0], config, 0)
        for regime, params in REGIMES.items():
            say(f"decoding {regime} text, {weights.drafter}")
            ways = [(ModelDecoder(one, new_tokens, params), config) for one in (whole, rounded)]
            found = timed(ways, prompts, arguments.repeats)
            told = [
                {
                    "length": one["mean_accepted_length"],
                    "speedup": one["speedup"]["mean"],
                    **{name: one[name] for name in ("tokens_per_s", "over_none", "num_identical", "num_outputs")},
                }
                for one in found
            ]
            record["rows"].append({"drafter": weights.drafter, "regime": regime, "ways": told})
    finish(arguments.out, record, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
