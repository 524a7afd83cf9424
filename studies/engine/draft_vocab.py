"""python -m studies.engine.draft_vocab: which token ids a draft should choose among, where it chooses among few.

The same few token ids, the first ones of the tokenizer and those that the model holds likeliest on a study's tuning
texts: what share of the model's own held-out text they hold, and how fast the model's copy with fewer bits drafts by
them, in turns with choosing among all.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip import DecodeConfig, SkipMask
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.sampling_regime import Sampling
from search.measure.decoder import ModelDecoder
from search.study.draft_ids import by_size, likeliest_sets
from search.study.prompts import EncodedPrompt
from search.study.space import vocabs_of
from studies.engine.siblings import open_study, timed
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say

PROG = "studies.engine.draft_vocab"
REGIMES = ("greedy", "t0.7")
TIMED = (1, -1)
"""Of the numbers of ids that a search has, from half of them on, those that drafts are timed with."""


def texts_of(decoder: ModelDecoder, prompts: Sequence[EncodedPrompt]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(Prompt, what the model says after it) of each."""
    plain = DecodeConfig.plain(decoder.model.num_layers)
    return [(one.ids, decoder.decode(one.ids, plain, place).ids) for place, one in enumerate(prompts)]


def coverage(shares: NDArray[Any], tokens: NDArray[np.int64], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Of each number of token ids what share of these tokens the first and the likeliest ones hold."""
    place = np.empty(len(shares), dtype=np.int64)
    place[np.argsort(-shares, kind="stable")] = np.arange(len(shares))
    return [
        {"size": size, "first": float((tokens < size).mean()), "likeliest": float((place[tokens] < size).mean())}
        for size in sizes
    ]


def table(record: Mapping[str, Any]) -> str:
    """Shares, then speeds."""
    shares = [
        [f"{one['regime']}, {by['size']}", f"{100 * by['first']:.1f} %", f"{100 * by['likeliest']:.1f} %"]
        for one in record["rows"]
        for by in one["coverage"]
    ]
    text = markdown_table(("text, token ids", "the first hold", "the likeliest hold"), shares)
    rows = []
    for one in record["rows"]:
        for way in one["ways"]:
            ends = way["over_none"]["interval"]
            more = f"{way['over_none']['mean']:.3f}" + ("" if ends is None else f" ({ends[0]:.3f}..{ends[1]:.3f})")
            rows.append(
                [
                    f"{one['regime']}, {way['name']}",
                    f"{way['mean_accepted_length']:.2f}",
                    f"{way['speedup']['mean']:.3f}",
                    "" if way is one["ways"][0] else more,
                    f"{way['num_identical']} of {way['num_outputs']}",
                ]
            )
    header = ("text, token ids", "tokens a round", "speedup", "over all", "identical")
    return f"{text}\nDrafts with {record['bits']} bits, gamma {record['gamma']}:\n\n{markdown_table(header, rows)}"


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDIES / "gemma3", help="its model and prompts")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=4, help="of the draft's weights")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--texts", type=int, default=24, help="tuning texts on which token ids are ranked")
    parser.add_argument("--prompts", type=int, default=12, help="held-out ones")
    parser.add_argument("--repeats", type=int, default=2, help="of decoding each")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, gamma=1, texts=1, prompts=1, repeats=1)
    check_out(arguments.out)
    spec, model, tuning, held_out = open_study(arguments.study)
    sizes = vocabs_of(model.vocab_size)[1:]
    record = facts(arguments.command) | {"dtype": spec.dtype, "num_threads": spec.num_threads, "rows": []}
    record |= {"bits": arguments.bits, "gamma": arguments.gamma}
    whole = DecodeConfig(skip_mask=SkipMask.none(model.num_layers).rounded(arguments.bits), gamma=arguments.gamma)
    for regime in REGIMES:
        say(f"{regime} text: ranking token ids")
        decoder = ModelDecoder(model, spec.max_new_tokens, Sampling.parse(regime).params())
        texts = texts_of(decoder, tuning[: arguments.texts])
        shares = decoder.token_shares([(*prompt, *more) for prompt, more in texts])
        said = np.concatenate([more for _, more in texts_of(decoder, held_out[: arguments.prompts])])
        sets = likeliest_sets(shares, sizes)
        decoder.know_draft_ids(sets)
        configs, names = [whole], ["all"]
        for size in (sizes[place] for place in TIMED):
            for ids in (None, dict(by_size(sets))[size]):
                mask = replace(whole.skip_mask, draft_vocab=size, draft_ids=ids)
                configs.append(whole.model_copy(update={"skip_mask": mask}))
                names.append(f"the {'first' if ids is None else 'likeliest'} {size}")
        say(f"decoding {regime} text in {len(configs)} ways")
        ways = [(decoder, config) for config in configs]
        found = timed(ways, [one.ids for one in held_out[: arguments.prompts]], arguments.repeats)
        told = [{"name": name} | one for name, one in zip(names, found, strict=True)]
        record["rows"].append({"regime": regime, "coverage": coverage(shares, said, sizes), "ways": told})
    finish(arguments.out, record, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
