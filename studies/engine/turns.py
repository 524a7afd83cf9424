"""python -m studies.engine.turns: a conversation, each prompt computed whole and from where the last turn ended.

A turn's prompt is all that was said before and a new message, the beginning of one of the demo's held-out prompts. The
model answers greedily. Both ways decode it one after the other, under the same config.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from layerskip import DecodeConfig, LayerSkipModel, PrefixCache
from layerskip.analysis.identity import check_identity
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.prompts import read_prompts
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study

PROG = "studies.engine.turns"
_DEMO = STUDIES / "demo"
_CACHE_BYTES = 1 << 29


@dataclass(frozen=True)
class Turn:
    """Of one repeat; seconds with and without a `PrefixCache`."""

    num_tokens: int
    """Of the prompt."""
    num_cached: int
    whole_first_s: float
    """To the first token."""
    cached_first_s: float
    whole_answer_s: float
    """To the last one."""
    cached_answer_s: float
    identical: bool
    is_tie: bool
    """The first difference lies where the target's two likeliest tokens tie within the rounding of its numbers."""


def converse(
    model: LayerSkipModel, config: DecodeConfig, messages: Sequence[Sequence[int]], new_tokens: int, repeat: int
) -> list[Turn]:
    """One conversation; which way goes first changes from turn to turn."""
    cache = PrefixCache(_CACHE_BYTES)
    text: list[int] = []
    turns = []
    for number, message in enumerate(messages):
        text += message
        found = {}
        for way in (None, cache) if (number + repeat) % 2 == 0 else (cache, None):
            found[way is cache] = model.generate(
                text, max_new_tokens=new_tokens, config=config, do_sample=False, eos_token_id=[], prefix_cache=way
            )
        whole, cached = found[False], found[True]
        identity = check_identity(model, text, cached.ids, whole.ids, model.sampler(do_sample=False))
        turns.append(
            Turn(
                len(text),
                cached.stats.num_cached,
                whole.stats.prefill_s,
                cached.stats.prefill_s,
                whole.stats.prefill_s + whole.stats.decode_s,
                cached.stats.prefill_s + cached.stats.decode_s,
                identity.identical,
                identity.is_tie,
            )
        )
        text += whole.ids
    return turns


def messages_of(model: LayerSkipModel, count: int, num_tokens: int) -> list[list[int]]:
    """The first tokens of as many held-out prompts, those too short left out."""
    encoded = (model.encode(one.messages[0][1]) for one in read_prompts(_DEMO / "held_out.jsonl"))
    return [ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens][:count]


def table(repeats: Sequence[Sequence[Turn]]) -> str:
    """A line a turn, medians over the repeats."""
    rows = []
    for number, turns in enumerate(zip(*repeats, strict=True), start=1):
        first = _both([one.whole_first_s for one in turns], [one.cached_first_s for one in turns])
        answer = _both([one.whole_answer_s for one in turns], [one.cached_answer_s for one in turns])
        same = "yes" if all(one.identical for one in turns) else "up to a tie"
        if not all(one.identical or one.is_tie for one in turns):
            same = "NO"
        rows.append([str(number), str(turns[0].num_tokens), str(turns[0].num_cached), first, answer, same])
    header = ["turn", "tokens of the prompt", "known", "ms to the first token", "ms to the last", "same tokens"]
    return markdown_table(header, rows)


def _both(whole: Sequence[float], cached: Sequence[float]) -> str:
    without, with_cache = median(whole), median(cached)
    return f"{1000 * without:.0f} / {1000 * with_cache:.0f} ({without / with_cache:.2f}×)"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(_DEMO / "model"), help="Hugging Face id or folder")
    parser.add_argument("--config", type=Path, help="decode config; plain decoding without one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--message-tokens", type=int, default=80, help="new tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, turns=1, message_tokens=1, new_tokens=2, repeats=1, threads=1)
    check_out(arguments.out)
    torch.set_num_threads(arguments.threads)
    model = LayerSkipModel.from_pretrained(arguments.model, device="cpu", dtype=arguments.dtype, looks_for_config=False)
    config = DecodeConfig.plain(model.num_layers) if arguments.config is None else DecodeConfig.load(arguments.config)
    messages = messages_of(model, arguments.turns, arguments.message_tokens)
    if len(messages) < arguments.turns:
        raise ValueError(
            f"--turns: must be at most {len(messages)}, the held-out prompts of {arguments.message_tokens} tokens, "
            f"got {arguments.turns}"
        )
    converse(model, config, messages[:1], arguments.new_tokens, 0)  # warms up
    repeats = [converse(model, config, messages, arguments.new_tokens, one) for one in range(arguments.repeats)]
    record = facts(arguments.command) | {"num_threads": arguments.threads}
    record["turns"] = [[asdict(one) for one in turns] for turns in repeats]
    finish(arguments.out, record, table(repeats))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
