"""python -m studies.smollm2.quantization: how far a model of rounded weights lies from the whole one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.decode_config import DecodeConfig, QuantizationName
from layerskip.huggingface.rounding import StockForward
from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study

PROG = "studies.smollm2.quantization"
_SMOLLM2 = STUDIES / "smollm2"
Text = tuple[list[int], list[int]]
"""A prompt and what the whole model continued it with."""


def log_probs(model: LayerSkipModel, texts: Sequence[Text]) -> torch.Tensor:
    """Of every token in place of each continued one: (positions, vocabulary), float32."""
    forward = StockForward(model.adapter)
    rows = [forward.logits([*prompt, *ids[:-1]], len(ids)) for prompt, ids in texts]
    return torch.cat(rows).float().log_softmax(dim=-1)


def compared(own: torch.Tensor, whole: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """own, whole: see `log_probs`; ids (positions,): what came there.

    Perplexity is of these, the share of positions with the same likeliest token, and how much of a token sampled from
    one distribution another's keeps: the sum of the smaller probabilities.
    """
    return {
        "perplexity": math.exp(-float(own.gather(1, ids[:, None]).double().mean())),
        "same_likeliest": float((own.argmax(dim=1) == whole.argmax(dim=1)).double().mean()),
        "overlap": float(torch.minimum(own.exp(), whole.exp()).sum(dim=1).double().mean()),
    }


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--model", default=str(_SMOLLM2 / "model"))
    parser.add_argument("--prompts", type=Path, default=_SMOLLM2 / "held_out.jsonl")
    parser.add_argument("--temperature", type=float, default=1.0, help="at which the whole model continues them")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, new_tokens=1)
    check_out(arguments.out)

    def loaded(quantization: QuantizationName | None) -> LayerSkipModel:
        how = {"dtype": "float32", "quantization": quantization, "looks_for_config": False}
        return LayerSkipModel.from_pretrained(arguments.model, **how)

    model = loaded(None)
    plain = DecodeConfig.plain(model.num_layers)
    texts: list[Text] = []
    for seed, prompt in enumerate(read_prompts(arguments.prompts)):
        found = encode_prompt(prompt, model, room=arguments.new_tokens)
        how = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
        out = model.generate(found, config=plain, max_new_tokens=arguments.new_tokens, eos_token_id=[], **how)
        texts.append((list(found), out.ids))
    ids = torch.tensor([one for _, continued in texts for one in continued])
    whole = log_probs(model, texts)
    rows = {"none": compared(whole, whole, ids)}
    for name in get_args(QuantizationName):
        rows[name] = compared(log_probs(loaded(name), texts), whole, ids)
    record = facts(arguments.command) | {"num_positions": len(ids), "number_format": model.number_format, "rows": rows}
    lines = [
        [name, f"{one['perplexity']:.2f}", f"{one['same_likeliest']:.1%}", f"{one['overlap']:.1%}"]
        for name, one in rows.items()
    ]
    header = ["weights rounded to", "perplexity", "same likeliest token", "of a sampled token kept"]
    finish(arguments.out, record, markdown_table(header, lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
