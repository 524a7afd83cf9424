"""python -m studies.engine.families: steps of today's small models by Transformers' modules, by torch and by kernels.

Random weights in the shapes of published models: a step takes as long as the model's own. Experts are chosen at
random then, so that several tokens read more of them than in a text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from layerskip.analysis.intervals import geometric_mean, ratio_interval
from layerskip.command_line.cli import OneLineParser, check_folders, check_least
from layerskip.command_line.command_model import add_quantization_argument
from layerskip.config.decode_config import QuantizationName
from layerskip.config.skip_mask import SkipMask
from layerskip.engines.base import Engine
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from layerskip.huggingface.quantization.weights import quantize
from studies.results import ENGINE, facts, finish, markdown_table, run_study

PROG = "studies.engine.families"
MODELS: dict[str, Callable[[], Any]] = {
    "SmolLM2-135M": lambda: transformers.LlamaConfig(
        **_sizes(576, 1536, 30, 9, 3, 49152), head_dim=64, tie_word_embeddings=True
    ),
    "Gemma-3-270m": lambda: transformers.Gemma3TextConfig(
        **_sizes(640, 2048, 18, 4, 1, 262144), head_dim=256, sliding_window=512
    ),
    "LFM2-350M": lambda: transformers.Lfm2Config(
        **_sizes(1024, 6656, 16, 16, 8, 65536), full_attn_idxs=[2, 5, 8, 10, 12, 14]
    ),
    "Qwen3-0.6B": lambda: transformers.Qwen3Config(
        **_sizes(1024, 3072, 28, 16, 8, 151936), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3.5-0.8B": lambda: transformers.Qwen3_5TextConfig(
        **_sizes(1024, 3584, 24, 8, 2, 248320),
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "Gemma-4-E2B": lambda: transformers.Gemma4TextConfig(
        **_sizes(1536, 6144, 35, 8, 1, 262144),
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=140_000,  # half of them: a step reads one row for each of its tokens
    ),
    "Gemma-3-1b": lambda: transformers.Gemma3TextConfig(
        **_sizes(1152, 6912, 26, 4, 1, 262144), head_dim=256, sliding_window=512
    ),
    "LFM2-8B-A1B, 8 of 24 layers": lambda: transformers.Lfm2MoeConfig(
        **_sizes(2048, 7168, 8, 32, 8, 65536),
        **_experts(32, 4, 1792),
        num_dense_layers=1,
        layer_types=["conv", "conv", "full_attention", "conv"] * 2,
    ),
    "Qwen3-30B-A3B, 4 of 48 layers": lambda: transformers.Qwen3MoeConfig(
        **_sizes(2048, 6144, 4, 32, 4, 151936), **_experts(128, 8, 768), head_dim=128
    ),
}
"""By the model whose sizes they are, as its card says."""
WHOLE, _IN_PLACE = "kernels, 32 bits of each weight", "kernels, in place"
_LEAN: dict[str, dict[str, bool]] = {
    WHOLE: {"compiled": True, "in_place": False},
    "torch": {},
    "kernels": {"compiled": True, "in_place": False},
    _IN_PLACE: {"compiled": True, "in_place": True},
}
"""The first and the last have no 8-bit weights but those copies that `kernels` has, too: not measured again."""
_FIRST_IDS = 1000
STEPS = ("plain", "verify", "int8")
PROMPT = "prompt"
"""Once on each engine, one after the other, so without an interval."""
"""A token, some at once, and a token drafted with 8-bit weights."""


def _sizes(hidden: int, middle: int, layers: int, heads: int, keys: int, vocabulary: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**dict(zip(names, (hidden, middle, layers, heads, keys), strict=True)), "vocab_size": vocabulary}


def _experts(count: int, chosen: int, middle: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": middle,
        "norm_topk_prob": True,
    }


@dataclass(frozen=True)
class Step:
    """Of one model on one engine."""

    model: str
    engine: str
    step: str
    ms: float
    """The median of all rounds."""
    times_faster: float
    """Than the same step by the model's modules, with its interval: the geometric mean over rounds, each of which runs
    all engines after one another."""
    low: float | None
    high: float | None


def measure(
    name: str,
    config: Any,
    dtype: torch.dtype,
    context: int,
    num_rows: int,
    rounds: int,
    *,
    quantization: QuantizationName | None = None,
) -> list[Step]:
    """Of rounded weights there are no drafts of 8 bits, and no engine reads them in place. In float32 weights are
    numbers of bfloat16, as published ones, but those of the engine `WHOLE`.

    Cost: the model four times in memory, of a mixture of experts these twice, and so many rounds of three steps on each
    engine."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if quantization is not None:
        quantize(model, quantization)
    adapter = ModelAdapter(model)
    engines: dict[str, Engine] = {"modules": EagerEngine(adapter)}
    for how, ways in _LEAN.items():
        if (how == _IN_PLACE and quantization) or (how == WHOLE and (quantization or dtype != torch.float32)):
            continue
        try:
            engines[how] = FusedEngine(adapter, **ways)
        except UnsupportedModelError:
            continue
        if how == WHOLE:
            for weight in model.parameters():
                weight.data.copy_(weight.bfloat16())
    ids = torch.randint(
        min(_FIRST_IDS, adapter.vocab_size), (context + num_rows,), generator=torch.Generator().manual_seed(0)
    )
    mask = SkipMask.none(adapter.num_layers).rounded(8)
    seconds: dict[tuple[str, str], list[float]] = {
        (engine, step): []
        for step in STEPS
        for engine in engines
        if step != "int8" or not (quantization or engine in (_IN_PLACE, WHOLE))
    }
    prompts = {}
    with ExitStack() as stack:
        for how, one in engines.items():
            with one.session(1):
                one.forward(ids[:1])
            stack.enter_context(one.session(len(ids)))
            start = time.perf_counter()
            one.forward(ids[:context])
            prompts[how] = [time.perf_counter() - start]
        for number in range(rounds + 1):
            for (engine, step), found in seconds.items():
                own = engines[engine]
                rows = ids[context:] if step == "verify" else ids[context : context + 1]
                start = time.perf_counter()
                own.forward(rows, mask if step == "int8" else None, num_logits=len(rows))
                if number:  # the first round makes what the others use
                    found.append(time.perf_counter() - start)
                own.cache.rollback_to(context)
    seconds |= {(how, PROMPT): found for how, found in prompts.items()}
    return [_compared(name, engine, step, found, seconds["modules", step]) for (engine, step), found in seconds.items()]


def _compared(model: str, engine: str, step: str, own: Sequence[float], modules: Sequence[float]) -> Step:
    ratios = [b / a for a, b in zip(own, modules, strict=True)]
    interval, times_faster = ratio_interval(ratios, seed=0), geometric_mean(ratios)
    low, high = (interval.low, interval.high) if interval else (None, None)
    return Step(model, engine, step, 1000 * statistics.median(own), times_faster, low, high)


def table(found: Sequence[Step], num_rows: int) -> str:
    """A line for each model and engine."""
    by_line: dict[tuple[str, str], dict[str, Step]] = {}
    for one in found:
        by_line.setdefault((one.model, one.engine), {})[one.step] = one
    header = ["model", "by", "prompt, ms", "plain step", f"{num_rows} rows", "8-bit draft", "times faster, plain"]
    lines = [
        [
            *(model, engine, f"{steps[PROMPT].ms:.0f}"),
            *(f"{steps[name].ms:.1f}" if name in steps else "" for name in STEPS),
            _times(steps["plain"]),
        ]
        for (model, engine), steps in by_line.items()
    ]
    return markdown_table(header, lines)


def _times(one: Step) -> str:
    return "" if one.engine == "modules" else f"{one.times_faster:.2f} ({one.low:.2f}..{one.high:.2f})"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add_quantization_argument(parser)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--context", type=int, default=200, help="tokens before the steps")
    parser.add_argument("--rows", type=int, default=5, help="tokens of a verification")
    parser.add_argument("--rounds", type=int, default=12, help="of all steps on all engines")
    parser.add_argument("--out", type=Path, default=ENGINE, help="folder for families.json and families.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, threads=1, context=1, rows=2, rounds=2)
    check_folders(arguments, "out")
    torch.set_num_threads(arguments.threads)
    sizes = (getattr(torch, arguments.dtype), arguments.context, arguments.rows, arguments.rounds)
    found = [
        step
        for name in arguments.models
        for step in measure(name, MODELS[name](), *sizes, quantization=arguments.quantization)
    ]
    record = {name: getattr(arguments, name) for name in ("dtype", "quantization")}
    record |= {"num_threads": arguments.threads, "steps": [asdict(one) for one in found]}
    finish(arguments.out / "families.json", facts(arguments.command) | record, table(found, arguments.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
