"""python -m studies.engine.batches: tokens a second of several texts decoded at once, each drafting or none.

A study's held-out prompts, as many at a time as said, plainly and under its config, and by Hugging Face's `generate` in
one padded batch. Everything is in the seconds: prompts, texts that end early, and the last ones, beside which none are
left. How many may draft at once (`--max-drafting` of the server) is read off here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerskip import DecodeConfig, LayerSkipModel
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.sampling_params import NOT_OF_GENERATE
from layerskip.config.sampling_regime import Sampling
from layerskip.engines.batch import Batch
from search.study.prompts import encode_prompts, load_prompts
from search.study.spec import load_spec
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say, spread

PROG = "studies.engine.batches"
PLAIN, DRAFTING, HUGGING_FACE = "plain", "each drafts", "generate, padded"
_SEED = 1
_LONG, _PIECES, _NUM_BEFORE, _NUM_BESIDE = 512, (512, 128, 64, 32, 16), 8, 64
"""Of what joins: tokens of the prompt and of its pieces; and of the other text, tokens before it and in all."""
Decode = Callable[[Sequence[tuple[int, ...]]], list[list[int]]]


def ours(model: LayerSkipModel, config: DecodeConfig, size: int, count: int, sampling: Sampling) -> Decode:
    """So many texts at once, each drafting under the config, up to `count` tokens."""

    def decode(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
        arguments: dict[str, Any] = {**sampling.model_dump(), "config": config, "seed": _SEED}
        found = model.generate_batch(
            prompts, max_batch_size=size, max_drafting=size, max_new_tokens=count, stop_strings=[], **arguments
        )
        return [one.ids for one in found]

    return decode


def theirs(model: LayerSkipModel, size: int, count: int, sampling: Sampling) -> Decode:
    """By the model's own `generate`, prompts padded on the left."""
    module: Any = model.model
    settings = sampling.model_dump(exclude=set(NOT_OF_GENERATE))
    if Sampling(**settings) != sampling:
        raise ValueError(
            f"regime {sampling.name}: generate, which is compared with, has no {' or '.join(NOT_OF_GENERATE)}"
        )
    ends = model.eos_token_ids

    def decode(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
        texts = []
        for first in range(0, len(prompts), size):
            group = prompts[first : first + size]
            width = max(len(one) for one in group)
            padding = [[0] * (width - len(one)) for one in group]
            ids = torch.tensor([[*before, *one] for before, one in zip(padding, group, strict=True)])
            seen = torch.tensor([[*before, *[1] * len(one)] for before, one in zip(padding, group, strict=True)])
            torch.manual_seed(_SEED)
            found = module.generate(ids, attention_mask=seen, max_new_tokens=count, pad_token_id=0, **settings)
            texts += [_whole(row, ends) for row in found[:, width:].tolist()]
        return texts

    return decode


def _whole(ids: list[int], ends: frozenset[int]) -> list[int]:
    """Without what comes after an end."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: last + 1]


def measure(
    ways: Mapping[tuple[int, str], Decode], prompts: Sequence[tuple[int, ...]], repeats: int
) -> list[dict[str, Any]]:
    """[What all prompts gave in each way], in turns; the order turns from repeat to repeat. Plainly one at a time comes
    first, which the tokens are compared with."""
    names = list(ways)
    for name in names:
        ways[name](prompts[:2])
    rates: dict[tuple[int, str], list[float]] = {name: [] for name in names}
    texts = {}
    for repeat in range(repeats):
        for place in np.roll(np.arange(len(names)), -repeat * (len(names) // repeats)).tolist():
            start = time.perf_counter()
            texts[names[place]] = ways[names[place]](prompts)
            rates[names[place]].append(sum(map(len, texts[names[place]])) / (time.perf_counter() - start))
    alone = texts[names[0]]
    return [
        {
            "size": size,
            "way": way,
            "tokens_per_s": rates[size, way],
            "num_identical": sum(one == other for one, other in zip(texts[size, way], alone, strict=True)),
        }
        for size, way in names
    ]


def joining(model: LayerSkipModel, prompts: Sequence[tuple[int, ...]], pieces: Sequence[int]) -> list[dict[str, Any]]:
    """What a text waits for at most, and the other for its first token, where a long prompt (all of these one after the
    other, up to `_LONG` tokens) joins a text that is decoded plainly; by the number of tokens in a piece of it."""
    long = tuple(token for one in prompts for token in one)[:_LONG]
    arguments: dict[str, Any] = {"config": DecodeConfig.plain(model.num_layers), "do_sample": False, "eos_token_id": []}
    rows = []
    for piece in pieces:
        batch, times, first = Batch(prompt_piece=piece), list[float](), list[float]()

        def decode(batch: Batch = batch, times: list[float] = times) -> None:
            for _ in model.stream(prompts[0], max_new_tokens=_NUM_BESIDE, batch=batch, **arguments):
                times.append(time.perf_counter())

        def join(batch: Batch = batch, first: list[float] = first) -> None:
            for _ in model.stream(long, max_new_tokens=2, batch=batch, **arguments):
                first.append(time.perf_counter())

        batch.start(decode)
        while len(times) < _NUM_BEFORE:
            batch.step()
        begun = time.perf_counter()
        batch.start(join)
        while batch.num_running:
            batch.step()
        waits = np.diff(times)
        usual, longest = float(np.median(waits[: _NUM_BEFORE - 1])), float(waits.max())
        rows.append({"piece": piece, "usual_s": usual, "longest_s": longest, "first_token_s": first[0] - begun})
    return rows


def table(record: Mapping[str, Any]) -> str:
    """A line for each number of texts, over the repeats; against plain and drafting ones one at a time in the same
    repeat. Then what a prompt holds up."""
    rows = []
    for regime in record["regimes"]:
        by_way = {(one["size"], one["way"]): one for one in regime["ways"]}
        alone = [by_way[1, way]["tokens_per_s"] for way in (PLAIN, DRAFTING)]
        for (size, way), one in by_way.items():
            rates = one["tokens_per_s"]
            same = "" if way == HUGGING_FACE else f"{one['num_identical']} of {record['num_prompts']}"
            times = [spread([rate / base for rate, base in zip(rates, bases, strict=True)], 2) for bases in alone]
            rows.append([f"{regime['regime']}, {size} at once, {way}", spread(rates, 1), *times, same])
    header = ("text, way", "tokens/s", "times plain alone", "times drafting alone", "identical")
    held_up = [
        [str(one["piece"]), *(f"{1000 * one[name]:.0f}" for name in ("usual_s", "longest_s", "first_token_s"))]
        for one in record["joining"]
    ]
    columns = ("tokens of a piece", "a token, ms", "the longest, ms", "to the other's first, ms")
    text = f"A text beside which a prompt of {_LONG} tokens is computed:"
    return f"{markdown_table(header, rows)}\n{text}\n\n{markdown_table(columns, held_up)}"


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDIES / "demo", help="its model, config and held-out prompts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16], help="texts at once, besides one")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, prompts=2, new_tokens=2, repeats=1)
    if min(arguments.sizes) < 2:
        raise ValueError(f"--sizes: must be at least 2, one at a time is there in any case; got {min(arguments.sizes)}")
    check_out(arguments.out)
    spec, _ = load_spec({}, str(arguments.study), demo=arguments.study)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    model = LayerSkipModel.from_config(arguments.study / "best.json")
    config, count = model.config, arguments.new_tokens
    _, held_out = load_prompts(spec.prompts, spec.held_out)
    prompts = [one.ids for one in encode_prompts(held_out, model, room=count)[: arguments.prompts]]
    record = facts(arguments.command) | {"num_threads": torch.get_num_threads(), "num_prompts": len(prompts)}
    record |= {"dtype": model.number_format, "num_new_tokens": count, "regimes": []}
    for sampling in config.samplings:
        say(f"{sampling.name} text")
        setting = config.for_sampling(sampling.params())
        ways: dict[tuple[int, str], Decode] = {}
        for size in (1, *sorted(arguments.sizes)):
            for way, one in ((PLAIN, DecodeConfig.plain(model.num_layers)), (DRAFTING, setting)):
                ways[size, way] = ours(model, one, size, count, sampling)
        most = max(arguments.sizes)
        ways[most, HUGGING_FACE] = theirs(model, most, count, sampling)
        found = measure(ways, prompts, arguments.repeats)
        record["regimes"].append({"regime": sampling.name, "ways": found})
    record["joining"] = joining(model, prompts, _PIECES)
    finish(arguments.out, record, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
