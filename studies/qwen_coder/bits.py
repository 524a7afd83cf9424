"""python -m studies.qwen_coder.bits: what drafts with weights of 8 and of 4 bits are worth on a model of 1.5 billion.

In turns, on the same prompts: plain decoding, lookups as usual, drafts with weights of 8 and 4 bits alone and after a
suffix, and so those of a small model (`--draft-model`), whatever its tokenizer; of other outputs, greedily, the model
with its own weights rounded, and llama.cpp with the published file (`--gguf`, see `studies.qwen_coder.make_model`),
whose most weights have 4 bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip import DecodeConfig, LayerSkipModel, PrefixCache
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.decode_config import DraftWeights, QuantizationName
from layerskip.config.skip_mask import DRAFT_BITS, SkipMask
from layerskip.config.usual_lookups import NGRAMS, SUFFIXES, lookup_alone, lookup_else
from layerskip.drafters.draft_weights import describe_weights
from layerskip.prompts import encode_prompt, read_prompts
from studies.engine.llama_cpp import PLAIN, Decode, compare, llama_cpp_at
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say

PROG = "studies.qwen_coder.bits"
_HERE = STUDIES / "qwen_coder"
_REGIMES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "t0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0},
}
_SMALLER = "drafts of a small model"
_PREFIX_BYTES = 1 << 30


def ways_of(num_layers: int, gamma: int, smaller: DraftWeights | None = None) -> dict[str, DecodeConfig]:
    """By name, plain decoding first. smaller: a model that drafts, too."""
    none = SkipMask.none(num_layers)
    drafts = {f"{bits}-bit drafts": DecodeConfig(skip_mask=none.rounded(bits), gamma=gamma) for bits in DRAFT_BITS}
    if smaller is not None:
        drafts[_SMALLER] = DecodeConfig(drafter="draft_model", skip_mask=none, gamma=gamma, draft_weights=smaller)
    return {
        PLAIN: DecodeConfig.plain(num_layers),
        "n-grams as usual": lookup_alone(num_layers, NGRAMS),
        "a suffix as usual": lookup_alone(num_layers, SUFFIXES),
        **drafts,
        **{f"a suffix, else {name}": lookup_else(one, SUFFIXES) for name, one in drafts.items()},
    }


class Ours:
    """Decodes prompts by one model; how many drafts were accepted is counted."""

    def __init__(self, model: LayerSkipModel, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._seeds = {tuple(prompt): seed for seed, prompt in enumerate(prompts)}
        # No prompt is computed twice: in kernels its pieces have the same bits.
        self._prefixes = PrefixCache(_PREFIX_BYTES)
        self.counts: dict[str, list[int]] = {}

    def by(self, name: str, config: DecodeConfig, how: dict[str, Any]) -> Decode:
        counts = self.counts[name] = [0, 0]

        def decode(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
            seed = {"seed": self._seeds[tuple(prompt)]} if how["do_sample"] else {}
            out = self._model.generate(
                prompt,
                max_new_tokens=count,
                config=config,
                eos_token_id=[],
                prefix_cache=self._prefixes,
                **how,
                **seed,
            )
            counts[0] += out.stats.num_accepted
            counts[1] += out.stats.num_drafted
            return out.ids, out.stats.decode_s

        return decode


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["", "tokens/s", "times plain", "times 8-bit drafts", "drafts accepted", "tokens like ours, plain"]
    lines = []
    for row in rows:
        for name, way in row["ways"].items():
            ratios = ["{:.2f} ({:.2f}..{:.2f})".format(*one) for one in way["ratio_to"].values()]
            accepted, drafted = way.get("accepted", (0, 0))
            share = f"{accepted / drafted:.0%}" if drafted else ""
            like = f"{way['tokens_like_plain']:.0%}"
            lines.append([f"{row['regime']}: {name}", f"{way['tokens_per_s']:.2f}", *ratios, share, like])
    return markdown_table(header, lines)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(_HERE / "model"))
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="of the same model, for llama.cpp")
    parser.add_argument("--draft-model", type=Path, metavar="FOLDER", help="a smaller model")
    parser.add_argument("--prompts", type=Path, default=STUDIES / "smollm2" / "held_out.jsonl")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gamma", type=int, default=4, help="drafts of a round")
    parser.add_argument("--num-prompts", type=int, default=10, help="the last so many")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, threads=1, gamma=1, num_prompts=1, new_tokens=2, repeats=1)
    check_out(arguments.out)
    smaller = None if arguments.draft_model is None else describe_weights(arguments.draft_model)
    torch.set_num_threads(arguments.threads)

    def loaded(quantization: QuantizationName | None) -> LayerSkipModel:
        how = {"dtype": arguments.dtype, "quantization": quantization, "looks_for_config": False}
        return LayerSkipModel.from_pretrained(arguments.model, device="cpu", **how)

    model = loaded(None)
    found = read_prompts(arguments.prompts)[-arguments.num_prompts :]
    prompts = [encode_prompt(one, model, room=arguments.new_tokens) for one in found]
    bases = (PLAIN, f"{DRAFT_BITS[0]}-bit drafts")
    rows = []
    for regime, how in _REGIMES.items():
        own = Ours(model, prompts)
        configs = ways_of(model.num_layers, arguments.gamma, smaller)
        ways = {name: own.by(name, config, how) for name, config in configs.items()}
        if regime == "greedy":
            for name in ("int8", "int4"):
                other = Ours(loaded(name), prompts)
                ways[f"weights of {name}, plain"] = other.by(name, configs[PLAIN], how)
            if arguments.gguf is not None:
                capacity = max(map(len, prompts)) + arguments.new_tokens
                ways["llama.cpp with the published file"] = llama_cpp_at(arguments.gguf, arguments.threads, capacity)
        ways_found = compare(ways, prompts, arguments.new_tokens, arguments.repeats, bases)
        for name, counts in own.counts.items():
            ways_found[name]["accepted"] = counts
        rows.append({"regime": regime, "ways": ways_found})
        say(table(rows[-1:]))
    settings = {name: getattr(arguments, name) for name in ("dtype", "threads", "gamma", "num_prompts", "new_tokens")}
    record = facts(arguments.command) | settings | {"engine": model.engine_reason, "rows": rows}
    finish(arguments.out, record, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
