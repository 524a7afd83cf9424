"""python -m studies.engine.sampling: what drawing a token costs, and what that makes of drafting.

Settings that chat models are published with (`top_p`, `top_k`, a penalty) are applied to every token that is drafted or
verified. Here by what this package does on a CPU and, in turns, by what `generate` does, which sorts the vocabulary: of
a study's model, on its prompts, first a token's time alone, then plain decoding and drafts with fewer bits.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling
from layerskip.rounds import likely_ids
from layerskip.rounds.sampling import seeded_sampler
from search.measure.decoder import Decoded, ModelDecoder
from studies.engine.siblings import open_study, timed, timed_cells
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say

PROG = "studies.engine.sampling"
SETTINGS = ("t0.7_k0", "t0.7", "t0.7_p0.9_k0", "t0.7_p0.8_k20_r1.1", "t1_k0_min0.05")
DECODED = ("t0.7_p0.8_k20_r1.1", "t0.7_p0.9_k0")
"""The first as Qwen2.5's chat models of this size are published."""
_ROWS = 48


@contextmanager
def as_generate() -> Iterator[None]:
    """No vocabulary is so large that it is not sorted."""
    own = likely_ids._LARGE
    likely_ids._LARGE = 1 << 62
    try:
        yield
    finally:
        likely_ids._LARGE = own


class AsGenerate(ModelDecoder):
    """Chooses tokens as `generate` does."""

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        """See `Decoder`."""
        with as_generate():
            return super().decode(prompt_ids, config, seed)


@torch.inference_mode()
def token_ms(model: LayerSkipModel, ids: Sequence[int], params: SamplingParams, repeats: int) -> list[float]:
    """[Ours, as `generate`] of choosing the token after each place of a text, median over places of the least of some
    repeats."""
    with model.engine.session(len(ids)):
        logits = model.engine.forward(torch.tensor(ids, device=model.device), num_logits=len(ids)).clone()
    least = [[math.inf] * len(ids) for _ in range(2)]
    for _, (way, around) in itertools.product(range(repeats), enumerate((nullcontext, as_generate))):
        sampler = seeded_sampler(params, 0, model.device)
        sampler.begin(1)
        for place in range(1, len(ids) + 1):
            start = time.perf_counter()
            with around():
                sampler.choose(sampler.shape(logits[place - 1 : place], ids[:place]), place)
            took = time.perf_counter() - start
            sampler.settle(place + 1)
            least[way][place - 1] = min(least[way][place - 1], took)
    return [1e3 * median(one) for one in least]


def table(record: Mapping[str, Any]) -> str:
    """Costs, then speeds."""
    costs = [[one["regime"], *(f"{ms:.2f}" for ms in one["token_ms"])] for one in record["tokens"]]
    text = f"Choosing a token among {record['vocab_size']} ids, ms:\n\n"
    text += markdown_table(("sampling", "ours", "as `generate`"), costs)
    rows = []
    for one in record["rows"]:
        for way in one["ways"]:
            rows.append([f"{one['regime']}, {way['name']}", *timed_cells(way)])
    text += f"\nDrafts with {record['bits']} bits, gamma {record['gamma']}, over our plain decoding:\n\n"
    return text + markdown_table(("sampling, way", "tokens/s", "over plain", "identical"), rows)


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDIES / "smollm2" / "bfloat16", help="its model and prompts")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=4, help="of the draft's weights")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12, help="held-out ones")
    parser.add_argument("--repeats", type=int, default=2, help="of decoding each")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, gamma=1, prompts=1, repeats=1)
    check_out(arguments.out)
    spec, model, tuning, held_out = open_study(arguments.study)
    record = facts(arguments.command) | {"dtype": spec.dtype, "num_threads": spec.num_threads}
    record |= {"vocab_size": model.vocab_size, "bits": arguments.bits, "gamma": arguments.gamma}
    record |= {"tokens": [], "rows": []}
    text = [token for one in tuning for token in one.ids][:_ROWS]
    for regime in SETTINGS:
        say(f"{regime}: choosing tokens")
        found = token_ms(model, text, Sampling.parse(regime).params(), arguments.repeats)
        record["tokens"].append({"regime": regime, "token_ms": found})
    plain = DecodeConfig.plain(model.num_layers)
    drafts = DecodeConfig(skip_mask=SkipMask.none(model.num_layers).rounded(arguments.bits), gamma=arguments.gamma)
    for regime in DECODED:
        say(f"{regime}: decoding")
        params = Sampling.parse(regime).params()
        ours, other = (kind(model, spec.max_new_tokens, params) for kind in (ModelDecoder, AsGenerate))
        ways = {
            "drafts": (ours, drafts),
            "plain, as `generate`": (other, plain),
            "drafts, as `generate`": (other, drafts),
        }
        told = timed(list(ways.values()), [one.ids for one in held_out[: arguments.prompts]], arguments.repeats)
        named = [{"name": name} | one for name, one in zip(ways, told, strict=True)]
        record["rows"].append({"regime": regime, "ways": named})
    finish(arguments.out, record, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
