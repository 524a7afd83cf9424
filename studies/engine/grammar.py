"""python -m studies.engine.grammar: what proposing the text that a grammar forces is worth, beside drafts and without.

A study's model describes functions as JSON of a schema, whose fields' names are forced. In turns: each token decoded
alone under the grammar's masks; with what is forced proposed; by drafts with fewer bits; and by both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerskip import DecodeConfig, Grammar, LayerSkipModel, SkipMask
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling
from layerskip.decoding import loop
from search.measure.decoder import Decoded, ModelDecoder
from studies.engine.siblings import open_study, timed, timed_cells
from studies.results import STUDIES, check_out, facts, finish, markdown_table, run_study, say

PROG = "studies.engine.grammar"
SCHEMA = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 40},
        "parameter_names": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 8},
        "summary": {"type": "string", "maxLength": 160},
        "contains_a_loop": {"type": "boolean"},
        "returns_a_value": {"type": "boolean"},
        "difficulty": {"enum": ["easy to read", "of average difficulty", "hard to read"]},
        "number_of_branches": {"type": "integer", "minimum": 0, "maximum": 50},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
REGIMES = ("greedy", "t0.7")
NEW_TOKENS = 160


class WithGrammar(ModelDecoder):
    """Decodes JSON."""

    def __init__(self, model: LayerSkipModel, params: SamplingParams, *, proposes_forced: bool) -> None:
        super().__init__(model, NEW_TOKENS, params)
        self._proposes_forced, self._grammar = proposes_forced, Grammar.json(SCHEMA)

    def _arguments(self, seed: int) -> dict[str, Any]:
        return super()._arguments(seed) | {"grammar": self._grammar}

    def decode(self, prompt_ids: Sequence[int], config: DecodeConfig, seed: int = 0) -> Decoded:
        """See `Decoder`."""
        own = loop.MOST_FORCED
        loop.MOST_FORCED = own if self._proposes_forced else 0
        try:
            return super().decode(prompt_ids, config, seed)
        finally:
            loop.MOST_FORCED = own


def prompts_of(model: LayerSkipModel, file: Path, count: int) -> list[list[int]]:
    """A description asked of each function that the prompts in this file have."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines()[:count]:
        code = json.loads(line)["messages"][0]["content"].split("\n\n", 1)[1]
        text = f"Describe this function as JSON of the schema {json.dumps(SCHEMA)}\n\n{code}"
        turns = [{"role": "user", "content": text}]
        encoded = model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        found.append(encoded["input_ids"])
    return found


def table(record: Mapping[str, Any]) -> str:
    """A way a row."""
    rows = []
    for one in record["rows"]:
        for way in one["ways"]:
            length = f"{way['mean_accepted_length']:.2f}"
            rows.append([f"{one['regime']}, {way['name']}", length, *timed_cells(way)])
    head = ("regime, way", "tokens a round", "tokens/s", "over one token after the other", "identical")
    return f"Drafts with {record['bits']} bits, gamma {record['gamma']}:\n\n" + markdown_table(head, rows)


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDIES / "qwen_coder", help="its model")
    parser.add_argument(
        "--functions",
        type=Path,
        default=STUDIES / "qwen_coder" / "changes.jsonl",
        help="prompts with code",
    )
    parser.add_argument("--bits", type=int, choices=(8, 4), default=4, help="of the draft's weights")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1, help="of decoding each")
    parser.add_argument("--out", type=Path, help="JSON file to write; a table of the same name lies beside it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, gamma=1, prompts=1, repeats=1)
    check_out(arguments.out)
    spec, model, _, _ = open_study(arguments.study)
    prompts = prompts_of(model, arguments.functions, arguments.prompts)
    record = facts(arguments.command) | {"dtype": spec.dtype, "num_threads": spec.num_threads}
    record |= {"bits": arguments.bits, "gamma": arguments.gamma, "rows": []}
    plain = DecodeConfig.plain(model.num_layers)
    drafts = DecodeConfig(skip_mask=SkipMask.none(model.num_layers).rounded(arguments.bits), gamma=arguments.gamma)
    for regime in REGIMES:
        say(f"{regime}: decoding")
        params = Sampling.parse(regime).params()
        never, always = (WithGrammar(model, params, proposes_forced=one) for one in (False, True))
        ways = {"one token after the other": (never, plain), "what is forced": (always, plain)}
        ways |= {"drafts": (never, drafts), "both": (always, drafts)}
        told = timed(list(ways.values()), prompts, arguments.repeats)
        record["rows"].append(
            {"regime": regime, "ways": [{"name": n} | one for n, one in zip(ways, told, strict=True)]}
        )
    finish(arguments.out, record, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
