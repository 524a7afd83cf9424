"""python -m studies.regimes: what each drafter of a finished study is worth for greedy and for sampled text."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerskip.analysis.intervals import geometric_mean, ratio_interval
from layerskip.analysis.repetition import repeated_ngram_share
from layerskip.command_line.cli import OneLineParser, check_least
from layerskip.config.decode_config import OWN_LAYERS, WAYS, DecodeConfig
from layerskip.config.sampling_regime import Sampling
from layerskip.config.usual_lookups import NGRAMS, lookup_alone
from layerskip.decoding.stats import DecodeStats
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.drafters.eagle.head import describe_eagle
from layerskip.huggingface.quantization.products import BYTES
from layerskip.machine.host import cpu_name, git_commit
from layerskip.model import LayerSkipModel
from search.measure.decoder import ModelDecoder
from search.measure.pairs import add_up
from search.regime_run import regime_study
from search.reporting.source import Address, opened
from search.study.draft_ids import sets_in
from search.study.prompts import EncodedPrompt, continuation_seed
from studies.results import run_study, write_json

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Regime:
    """How text is decoded."""

    sampling: Sampling
    max_new_tokens: int

    @property
    def name(self) -> str:
        return f"{self.sampling.name}, {self.max_new_tokens} tokens"


_TOKENS = 96
REGIMES = tuple(
    Regime(Sampling.parse(name), num) for name, num in (("greedy", 48), ("greedy", 128), ("t0.7", 96), ("t1", 96))
)


@dataclass(frozen=True)
class Row:
    """One way in one regime, over plain decoding of the same text."""

    speedup: float
    low: float
    high: float
    num_prompts: int
    num_identical: int
    """Outputs that were plain decoding's."""
    tokens_per_s: float
    end_to_end: tuple[float, float, float]
    """Speedup with the prompt's own forward in the seconds, and its interval."""
    draft_cost: float | None
    """A drafted token in plain steps; None without drafts."""
    verify_cost: float | None
    """A verification in plain steps, of as many tokens as were drafted."""
    acceptance_rate: float | None
    accepted_by_position: tuple[float, ...]
    """Of the drafts at each place in a round, the share that was accepted."""
    mean_accepted_length: float | None
    extra_bytes: int
    """Of weights beside the model's own."""
    training_minutes: float
    """Of these weights."""
    config: dict[str, Any]
    by_group: dict[str, tuple[float, float, float]]
    """Speedup and its interval of each group's prompts, where they have groups."""


def ways_in(
    regime: Regime,
    config: DecodeConfig,
    summaries: Mapping[str, Mapping[str, Any]],
    others: Mapping[str, DecodeConfig] | None = None,
) -> dict[str, DecodeConfig]:
    """The exported setting, usual n-grams, the fastest finalist of every drafter in the nearest regime's study, and
    what other studies export.

    summaries: of each regime's study by its name. others: configs by the names of their studies.
    """
    params = regime.sampling.params()
    setting = config.for_sampling(params)
    ways = {"exported": setting.bare(), "n-grams as usual": lookup_alone(config.skip_mask.num_layers, NGRAMS)}
    summary = summaries[config.regime_for(params) or next(iter(summaries))]
    finalists = sorted((one for one in summary["candidates"] if one["speedup"]), key=lambda one: one["speedup"])
    configs = [DecodeConfig(**one["config"]).bare() for one in finalists]
    fastest = {found.way: found for found in configs}
    ways |= {f"best {name}": fastest[name] for name in WAYS if name in fastest}
    return ways | {f"exported by {name}": one.for_sampling(params).bare() for name, one in (others or {}).items()}


def measure(
    decoder: ModelDecoder, ways: Mapping[str, DecodeConfig], prompts: Sequence[EncodedPrompt], repeats: int
) -> tuple[dict[str, Row], float | None]:
    """(rows by way, share of 4-grams in plain text that were there before).

    Each way by itself, as a user runs it, after the one before on the same prompt; who begins goes round. Sampled text
    is another one in each repeat. Cost: repeats x (ways + 2) decodings a prompt.
    """
    plain = DecodeConfig.plain(decoder.model.num_layers)
    names, configs = ["plain", *ways], [plain, *ways.values()]
    decoding_s, whole_s = np.zeros((2, repeats, len(prompts), len(names)))
    texts, identical = [], dict.fromkeys(ways, 0)
    stats: list[list[DecodeStats]] = [[] for _ in names]
    for row, prompt in enumerate(prompts):
        same = dict.fromkeys(names, True)
        for repeat in range(repeats):
            seed = continuation_seed(0, prompt.ids, repeat)
            reference = decoder.decode(prompt.ids, plain, seed).ids
            texts.append((prompt.ids, reference))
            for turn in range(len(names)):
                place = (row + repeat + turn) % len(names)
                out = decoder.decode(prompt.ids, configs[place], seed)
                decoding_s[repeat, row, place] = out.stats.decode_s
                whole_s[repeat, row, place] = out.stats.prefill_s + out.stats.decode_s
                stats[place].append(out.stats)
                same[names[place]] &= out.ids == reference
        for name in ways:
            identical[name] += same[name]
    plain_s = 1.0 / _rate(stats[0])
    groups = dict.fromkeys(one.group for one in prompts if one.group is not None)
    members = {name: [row for row, one in enumerate(prompts) if one.group == name] for name in groups}
    rows = {}
    for place, (name, config) in enumerate(ways.items(), start=1):
        total = add_up(stats[place])
        drafted = zip(total.accepted_by_position, total.drafted_by_position, strict=True)
        extra_bytes, training_minutes = _weights_of(decoder.model, config)
        rows[name] = Row(
            *_speedup(decoding_s, place, is_sampled=decoder.is_sampled),
            num_prompts=len(prompts),
            num_identical=identical[name],
            tokens_per_s=_rate(stats[place]),
            end_to_end=_speedup(whole_s, place, is_sampled=decoder.is_sampled),
            draft_cost=total.draft_s / total.num_drafted / plain_s if total.num_drafted else None,
            verify_cost=total.verify_s / total.num_rounds / plain_s if total.num_rounds else None,
            acceptance_rate=total.acceptance_rate,
            accepted_by_position=tuple(round(right / count, 4) for right, count in drafted if count),
            mean_accepted_length=total.mean_accepted_length,
            extra_bytes=extra_bytes,
            training_minutes=training_minutes,
            config=config.model_dump(mode="json", exclude_none=True, exclude={"draft_ids"}),
            by_group={
                group: _speedup(decoding_s[:, places], place, is_sampled=decoder.is_sampled)
                for group, places in members.items()
            },
        )
    return rows, repeated_ngram_share(texts)


def _rate(stats: Sequence[DecodeStats]) -> float:
    """Tokens/s of several runs, prompts apart."""
    return sum(one.num_emitted - 1 for one in stats) / sum(one.decode_s for one in stats)


def _speedup(seconds: Floats, place: int, *, is_sampled: bool) -> tuple[float, float, float]:
    """Of a way over plain decoding, the first, and its interval over prompts. seconds: (repeats, prompts, ways)."""
    typical = np.exp(np.log(seconds).mean(axis=0)) if is_sampled else np.median(seconds, axis=0)
    ratios = (typical[:, 0] / typical[:, place]).tolist()
    interval = ratio_interval(ratios, seed=0)
    low, high = (interval.low, interval.high) if interval else (0.0, float("inf"))
    return geometric_mean(ratios), low, high


def _draft_ids_of(folder: Path) -> dict[str, str]:
    """The sets of token ids that a study's finalists may name; none where its storage is not there."""
    try:
        with opened(Address(str(folder), None, None), demo=folder) as source:
            return sets_in(source.load().user_attrs)
    except (OSError, ValueError):
        return {}


def _weights_of(model: LayerSkipModel, config: DecodeConfig) -> tuple[int, float]:
    """(Bytes beside the model's own, minutes of training) that a config needs; rounded copies are of all weights."""
    if config.draft_weights is None:
        bits = config.skip_mask.bits if config.computes_drafts else None
        return 0 if bits is None else round(BYTES[bits] * model.model.num_parameters()), 0.0
    own = config.draft_weights.path == OWN_LAYERS
    folder = Path(model.model.config.name_or_path if own else config.draft_weights.path)
    record = folder / "training.json"
    if record.exists():  # a whole model, as `studies.demo.make_model` makes it, or one with a layer for drafts in it
        minutes = float(json.loads(record.read_text(encoding="utf-8"))["training_minutes"])
    else:
        minutes = float(describe_eagle(folder)[1]["training"]["seconds"]) / 60
    return loaded_weights(model.engine, config.draft_weights).nbytes, minutes


def table(result: Mapping[str, Any]) -> str:
    """Markdown: ways in rows, regimes in columns."""
    regimes = result["regimes"]
    rows = []
    for name in dict.fromkeys(name for one in regimes for name in one["rows"]):
        cells = []
        for one in regimes:
            row = one["rows"].get(name)
            cells.append(_with_interval(row["speedup"], row["low"], row["high"]) if row else "")
        rows.append([name, *cells])
    shares = [one["repeated_ngram_share"] for one in regimes]
    told = ["-" if share is None else f"{100 * share:.0f} %" for share in shares]
    return _lines(["way", *(one["name"] for one in regimes)], [*rows, ["*4-grams that were there before*", *told]])


def details(regime: Mapping[str, Any]) -> str:
    """Markdown of one regime: what each way costs and what of it was right."""
    heads = ("tokens/s", "speedup", "prompts included", "draft token", "verification", "accepted", "at places 1 to 4")
    heads = (*heads, "tokens a round", "extra MB", "training, minutes")
    rows = []
    for name, row in regime["rows"].items():
        places = " ".join(f"{one:.2f}" for one in row["accepted_by_position"][:4])
        cells = [f"{row['tokens_per_s']:.0f}", _with_interval(row["speedup"], row["low"], row["high"])]
        cells += [_with_interval(*row["end_to_end"])]
        cells += ["" if (one := row[key]) is None else f"{one:.2f}" for key in ("draft_cost", "verify_cost")]
        cells += ["" if row["acceptance_rate"] is None else f"{100 * row['acceptance_rate']:.0f} %", places]
        cells += ["" if row["mean_accepted_length"] is None else f"{row['mean_accepted_length']:.2f}"]
        cells += [f"{row['extra_bytes'] / 1e6:.1f}", f"{row['training_minutes']:.0f}"]
        rows.append([name, *cells])
    return _lines([regime["name"], *heads], rows)


def by_group(regime: Mapping[str, Any]) -> str:
    """Markdown of one regime: ways in rows, groups of prompts in columns; empty where there are none."""
    groups = [*next(iter(regime["rows"].values()))["by_group"]]
    if not groups:
        return ""
    rows = []
    for name, row in regime["rows"].items():
        whole = row["speedup"], row["low"], row["high"]
        rows.append([name, *(_with_interval(*one) for one in (*row["by_group"].values(), whole))])
    return _lines([regime["name"], *groups, "all"], rows)


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([head, "|---" * len(header) + "|", *lines]) + "\n"


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f}..{high:.2f})"


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog="python -m studies.regimes", description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("studies/demo"), help="folder of a finished study")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--regimes", nargs="+", metavar="NAME", help="default: greedy, t0.7 and t1")
    parser.add_argument("--tokens", type=int, help="in every regime, in place of its own; named ones have 96")
    parser.add_argument("--repeats", type=int, default=3, help="times that each way decodes each prompt")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        default=[],
        metavar="STUDY",
        help="other finished studies of the same model, of fewer drafters: what they export is measured too",
    )
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    return run_study("studies.regimes", parser, _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, prompts=2, tokens=2, repeats=1)
    regimes = _regimes(arguments.regimes, arguments.tokens)
    import torch

    from search.study.prompts import encode_prompts, load_prompts
    from search.study.spec import load_spec

    spec, paths = load_spec({}, str(arguments.study), demo=arguments.study)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    model = LayerSkipModel.from_config(paths.best)
    files = {name: regime_study(spec, paths, name)[1].summary for name in spec.regimes or ()}
    files = files or dict.fromkeys(model.config.regime_names or ("greedy",), paths.summary)
    summaries = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    for folder in {file.parent for file in files.values()}:
        model.adapter.know_draft_ids(_draft_ids_of(folder))
    room = max(one.max_new_tokens for one in regimes)
    held_out = load_prompts(spec.prompts, spec.held_out)[1]
    prompts = encode_prompts(held_out, model, room=room)[: arguments.prompts]
    others = {folder.name: DecodeConfig.load(folder / paths.best.name) for folder in arguments.against}
    found = []
    for regime in regimes:
        ways = ways_in(regime, model.config, summaries, others)
        decoder = ModelDecoder(model, regime.max_new_tokens, regime.sampling.params())
        measure(decoder, ways, prompts[:1], 1)  # allocators, caches and kernels settle
        rows, share = measure(decoder, ways, prompts, arguments.repeats)
        told = {name: asdict(row) for name, row in rows.items()}
        found.append({"name": regime.name, "rows": told, "repeated_ngram_share": share})
    result = {
        "command": arguments.command,
        "commit": git_commit(Path(__file__).parent),
        "cpu": cpu_name(),
        "engine": model.engine_name,
        "num_threads": torch.get_num_threads(),
        "regimes": found,
    }
    if arguments.out is not None:
        write_json(arguments.out, result)
    sys.stdout.write("\n".join([table(result), *map(details, found), *filter(None, map(by_group, found))]))
    return 0


def _regimes(names: Sequence[str] | None, num_tokens: int | None) -> list[Regime]:
    """Raises: ValueError for a name that is none."""
    chosen = REGIMES if names is None else [Regime(Sampling.parse(name), _TOKENS) for name in names]
    return [replace(one, max_new_tokens=num_tokens or one.max_new_tokens) for one in chosen]


if __name__ == "__main__":
    raise SystemExit(main())
