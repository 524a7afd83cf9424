"""python -m studies.regimes: what each drafter of a finished study is worth for greedy and for sampled text."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerskip.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.config import DecodeConfig, write_atomically
from layerskip.intervals import geometric_mean, ratio_interval
from layerskip.machine import cpu_name, git_commit
from layerskip.model import LayerSkipModel
from layerskip.repetition import repeated_ngram_share
from layerskip.usual_lookups import NGRAMS, lookup_alone
from search.prompts import EncodedPrompt


@dataclass(frozen=True)
class Regime:
    """How text is decoded."""

    name: str
    max_new_tokens: int
    temperature: float | None = None
    """None is greedy. Sampling is from the whole vocabulary."""

    @property
    def arguments(self) -> dict[str, Any]:
        """For `generate_in_lockstep`, but for the seed."""
        common: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "repetition_penalty": 1.0}
        if self.temperature is None:
            return common | {"do_sample": False}
        return common | {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


REGIMES = (
    Regime("greedy, 48 tokens", 48),
    Regime("greedy, 128 tokens", 128),
    Regime("temperature 0.7, 96 tokens", 96, 0.7),
    Regime("temperature 1.0, 96 tokens", 96, 1.0),
)


@dataclass(frozen=True)
class Row:
    """One way in one regime, over plain decoding of equally many tokens in the same turns."""

    speedup: float
    low: float
    high: float
    num_prompts: int
    num_identical: int | None
    """Greedy outputs that were plain decoding's; None where tokens are drawn."""


def ways_of(summary: Mapping[str, Any], config: DecodeConfig) -> dict[str, DecodeConfig]:
    """Usual n-grams, the exported config, and the fastest finalist of every drafter, by name."""
    ways = {"n-grams as usual": lookup_alone(config.skip_mask.num_layers, NGRAMS), "exported": config.bare()}
    for candidate in sorted(summary.get("candidates", ()), key=lambda one: -(one["speedup"] or 0.0)):
        found = DecodeConfig(**candidate["config"])
        ways.setdefault(f"best {found.drafter}", found.bare())
    return ways


def measure(
    model: LayerSkipModel, regime: Regime, ways: Mapping[str, DecodeConfig], prompts: Sequence[EncodedPrompt], seed: int
) -> tuple[dict[str, Row], float | None]:
    """(rows by way, share of 4-grams in plain text that were there before). Cost: ways + 1 decodings a prompt."""
    plain = DecodeConfig.plain(model.num_layers)
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    identical = dict.fromkeys(ways, 0)
    texts = []
    for number, prompt in enumerate(prompts):
        drawn = {"seed": seed + number} if regime.temperature is not None else {}
        outs = model.generate_in_lockstep(prompt.ids, [plain, *ways.values()], **regime.arguments, **drawn)
        texts.append((prompt.ids, outs[0].ids))
        num_tokens = min(len(out.ids) for out in outs)
        base = outs[0].stats.tokens_per_s_of_first(num_tokens)
        for name, out in zip(ways, outs[1:], strict=True):
            identical[name] += out.ids == outs[0].ids
            rate = out.stats.tokens_per_s_of_first(num_tokens)
            if base is not None and rate is not None:
                ratios[name].append(rate / base)
    rows = {}
    for name, found in ratios.items():
        interval = ratio_interval(found, seed=seed)
        low, high = (interval.low, interval.high) if interval else (0.0, float("inf"))
        same = identical[name] if regime.temperature is None else None
        rows[name] = Row(geometric_mean(found), low, high, len(found), same)
    return rows, repeated_ngram_share(texts)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: ways in rows, regimes in columns."""
    regimes = result["regimes"]
    lines = [f"| way | {' | '.join(one['name'] for one in regimes)} |", f"|---{'|---' * len(regimes)}|"]
    for name in result["ways"]:
        cells = []
        for one in regimes:
            row = one["rows"][name]
            cells.append(f"{row['speedup']:.2f} ({row['low']:.2f}..{row['high']:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    shares = [one["repeated_ngram_share"] for one in regimes]
    told = ["-" if share is None else f"{100 * share:.0f} %" for share in shares]
    return "\n".join([*lines, f"| *4-grams that were there before* | {' | '.join(told)} |"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="python -m studies.regimes", description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("studies/demo"), help="folder of a finished study")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--tokens", type=int, help="tokens in every regime, instead of their own")
    parser.add_argument("--seed", type=int, default=0, help="of drawn tokens and intervals")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    arguments = parser.parse_args(given)
    return run_command("studies.regimes", lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    check_least(arguments, prompts=2, seed=0)
    quiet_libraries()
    import torch

    from search.prompts import encode_prompts, load_prompts
    from search.spec import load_spec

    spec, paths = load_spec({}, str(arguments.study), demo=arguments.study)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    model = LayerSkipModel.from_config(paths.best)
    summary = json.loads(paths.summary.read_text(encoding="utf-8"))
    ways = ways_of(summary, model.config)
    regimes = [Regime(one.name, arguments.tokens or one.max_new_tokens, one.temperature) for one in REGIMES]
    room = max(one.max_new_tokens for one in regimes)
    held_out = encode_prompts(load_prompts(spec.prompts, spec.held_out)[1], model, room=room)[: arguments.prompts]
    measure(model, Regime("warm up", 8), ways, held_out[:2], arguments.seed)
    found = []
    for regime in regimes:
        rows, share = measure(model, regime, ways, held_out, arguments.seed)
        told = {name: asdict(row) for name, row in rows.items()}
        found.append(asdict(regime) | {"rows": told, "repeated_ngram_share": share})
    result = {
        "command": shlex.join(["python", "-m", "studies.regimes", *argv]),
        "commit": git_commit(Path(__file__).parent),
        "cpu": cpu_name(),
        "engine": model.engine_name,
        "num_threads": torch.get_num_threads(),
        "ways": {name: config.model_dump(mode="json", exclude_none=True) for name, config in ways.items()},
        "regimes": found,
    }
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
