"""python -m studies.engine.lookups: what following a token and proposing cost a lookup, after how long a text."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from layerskip.command_line.cli import OneLineParser, check_folders, check_least
from layerskip.config.lookup_settings import LookupSettings
from layerskip.config.usual_lookups import NGRAMS, NUM_TOKENS, SUFFIXES
from layerskip.drafters.lookups.drafter import LookupSession
from studies.demo.corpus import read_modules
from studies.results import ENGINE, STUDIES, facts, finish, markdown_table, run_study

PROG = "studies.engine.lookups"
TOKENIZER = STUDIES / "demo" / "model"
LOOKUPS: dict[str, LookupSettings] = {"prompt_lookup": NGRAMS, "suffix": SUFFIXES}
_TIMED = 500
"""Tokens at the end of a text, each of them followed and then proposed after."""
_PERIOD = 40
_RANDOM_IDS = 64
"""So few that two in a row often stood before: of many the index would never have to compare anything."""


@dataclass(frozen=True)
class Costs:
    """One lookup at one length of one text; microseconds are (median, 95th percentile)."""

    lookup: str
    text: str
    num_tokens: int
    token_us: tuple[float, float]
    """To follow a token."""
    proposal_us: tuple[float, float]
    """To propose up to `NUM_TOKENS` tokens after it, or to find nothing."""
    mean_proposed: float
    share_right: float | None
    """Of the proposed tokens; None if none was."""


def looping_text(num_tokens: int) -> list[int]:
    """The same tokens over and over."""
    return list(itertools.islice(itertools.cycle(range(1, _PERIOD + 1)), num_tokens))


def random_text(num_tokens: int) -> list[int]:
    """Of few different tokens, each as likely."""
    draw = random.Random(0)
    return [draw.randrange(_RANDOM_IDS) for _ in range(num_tokens)]


def natural_text(num_tokens: int) -> list[int]:
    """Python's standard library as the demo model reads it, module by module. Raises: ValueError if it is shorter."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    ids: list[int] = []
    for module in read_modules():
        ids += tokenizer(module.text)["input_ids"]
        if len(ids) >= num_tokens:
            return ids[:num_tokens]
    raise ValueError(f"--lengths: must be at most the standard library's {len(ids)} tokens, got {num_tokens}")


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "looping": looping_text,
    "random": random_text,
    "natural": natural_text,
}


def measure(lookup: str, name: str, text: Sequence[int]) -> Costs:
    """The costs at the end of a text that grew token by token, as in decoding."""
    session = LookupSession(LOOKUPS[lookup], NUM_TOKENS, 0.0)
    start = max(0, len(text) - _TIMED - 1)
    context = list(text[:start])
    session.follow(context)
    token_ns, proposal_ns = [], []
    num_proposed = num_right = 0
    for place in range(start, len(text) - 1):
        context.append(text[place])
        began = time.perf_counter_ns()
        session.follow(context)
        followed = time.perf_counter_ns()
        draft = session.propose(context, NUM_TOKENS, None)
        proposal_ns.append(time.perf_counter_ns() - followed)
        token_ns.append(followed - began)
        if draft is not None:
            ids, coming = draft.ids.tolist(), text[place + 1 : place + 1 + len(draft.ids)]
            num_proposed += len(ids)
            pairs = enumerate(zip(ids, coming, strict=False))
            num_right += next((i for i, (one, other) in pairs if one != other), len(coming))
    return Costs(
        lookup,
        name,
        len(text),
        _microseconds(token_ns),
        _microseconds(proposal_ns),
        num_proposed / len(token_ns),
        num_right / num_proposed if num_proposed else None,
    )


def _microseconds(nanoseconds: Sequence[int]) -> tuple[float, float]:
    median, high = np.percentile(np.asarray(nanoseconds) / 1000, (50, 95))
    return float(median), float(high)


def table(results: Sequence[Costs]) -> str:
    """One line a lookup, text and length."""
    header = ("lookup", "text", "tokens", "a token, µs: median", "95 %", "a proposal, µs: median", "95 %")
    rows = [
        [one.lookup, one.text, f"{one.num_tokens:,}"]
        + [f"{us:.1f}" for us in (*one.token_us, *one.proposal_us)]
        + [f"{one.mean_proposed:.1f}", "" if one.share_right is None else f"{one.share_right:.0%}"]
        for one in results
    ]
    return markdown_table((*header, "tokens proposed", "of them right"), rows)


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="tokens of the texts")
    parser.add_argument("--out", type=Path, default=ENGINE, help="folder for lookups.json and lookups.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, lengths=2)
    check_folders(arguments, "out")
    torch.set_num_threads(1)
    load = [_load()]
    results = []
    for name, make_text in TEXTS.items():
        text = make_text(max(arguments.lengths))
        results += [measure(one, name, text[:length]) for one in LOOKUPS for length in arguments.lengths]
    record = {
        "num_threads": 1,
        "load_before_and_after": [*load, _load()],
        "settings": {name: one.model_dump() | {"num_tokens": NUM_TOKENS} for name, one in LOOKUPS.items()},
        "results": [asdict(one) for one in results],
    }
    finish(arguments.out / "lookups.json", facts(arguments.command) | record, table(results))
    return 0


def _load() -> float | None:
    """Processes that wanted a core in the last minute; None where the system does not tell."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


if __name__ == "__main__":
    raise SystemExit(main())
