"""python -m studies.engine.siblings: what siblings add to a round of the demo model, and where they pay."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.intervals import geometric_mean, ratio_interval
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, make_teacher_forcing
from layerskip.command_line.cli import OneLineParser, check_folders, check_least
from layerskip.config.decode_config import MAX_SIBLINGS
from layerskip.drafters.draft_weights import describe_weights
from layerskip.prompts import encode_prompt, read_prompts
from layerskip.rounds.sampling import SamplingParams
from search.measure.decoder import ModelDecoder, load_model
from search.predict.costs import CostModel
from search.predict.replay import Counts, Settings, TextRows, replay
from search.study.prompts import EncodedPrompt, encode_prompts, load_prompts
from search.study.space import SIBLING_THRESHOLDS
from search.study.spec import StudySpec, load_spec
from studies.proving.costs import COSTS
from studies.results import ENGINE, STUDIES, facts, finish, markdown_table, run_study, say

PROG = "studies.engine.siblings"
DEMO = STUDIES / "demo"
REGIMES = {"greedy": SamplingParams(), "t0.7": SamplingParams(do_sample=True, temperature=0.7, top_k=0)}
KEPT = (2, 3, 4, 6, 8)
"""Masks are early exits after so many of the demo's 12 layers, and every other layer."""
GAMMAS = (1, 2, 3, 4, 6, 8)
SHOWN_GAMMAS = (1, 2, 4, 8)
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
NUM_SIBLINGS = (1, 2, 3)
"""Tried at every machine's prices; rounds are told of up to MAX_SIBLINGS."""
WHERE = {"everywhere": (1.0,), "where unsure": tuple(one for one in SIBLING_THRESHOLDS if one < 1.0)}
"""Each with its values of `sibling_threshold`."""
EAGLE = STUDIES / "eagle" / "weights"
TIMED_EXIT, TIMED_GAMMA, TIMED_SIBLINGS = 3, 4, ((0, 1.0), (1, 1.0), (1, 0.5), (3, 1.0), (3, 0.5))
"""What is decoded: the early exit of the fastest mask, and trained weights where there are any, all at one gamma."""
_DEPTH = max(GAMMAS) - 1


@dataclass(frozen=True)
class Drafts:
    """One mask on the texts of one regime."""

    mask: SkipMask
    reading: DraftReadings
    rows: TextRows

    def counts(self, settings: Settings, verify_s: Sequence[float] | None = None) -> Counts:
        return replay(self.reading, self.rows, settings, verify_s)

    def mean_accepted_length(self, gamma: int, siblings: int) -> float:
        """Tokens that a round emits, what is cut at a text's end not counted."""
        counts = self.counts(replace(Settings.grid([gamma], [0.0], [0.0]), siblings=siblings))
        by_rounds = (self.rows.lengths - 1).sum() - counts.target_only.sum()
        return float(by_rounds / counts.rounds.sum())

    def log_speedups(self, cost: CostModel, grid: Settings) -> NDArray[np.float64]:
        """(S,): of every setting, mean over texts."""
        counts = self.counts(grid, cost.verify_s)
        drafts = [cost.draft_s(self.mask, threshold=threshold) for threshold in (False, True)]
        draft_s = np.where((grid.draft_threshold > 0) | (grid.sibling_threshold < 1.0), drafts[1], drafts[0])[:, None]
        seconds = counts.drafted * draft_s + counts.verify_s + counts.target_only * cost.verify_s[0]
        plain = (self.rows.lengths - 1) * cost.verify_s[0]
        logs: NDArray[np.float64] = np.log(plain / seconds).mean(axis=1)
        return logs


def masks_of(num_layers: int) -> dict[str, SkipMask]:
    """By name."""
    exits = {f"exit after {count}": SkipMask.early_exit(num_layers, count) for count in KEPT if count < num_layers}
    return exits | {"every other layer": SkipMask.alternating(num_layers, offset=1)}


def read(model: LayerSkipModel, params: SamplingParams, prompts: Sequence[Sequence[int]], new_tokens: int) -> Any:
    """{mask's name: `Drafts`} on the target's own continuations."""
    decoder, plain = ModelDecoder(model, new_tokens, params), DecodeConfig.plain(model.num_layers)
    continued = [(tuple(one), tuple(decoder.decode(one, plain, seed).ids), seed) for seed, one in enumerate(prompts)]
    texts = [ForcedText(*one) for one in continued if len(one[1]) > 1]
    forcing = make_teacher_forcing(model, texts, params)
    rows = TextRows(np.asarray(forcing.lengths), np.asarray(forcing.target_probs), new_tokens)
    return {name: Drafts(mask, forcing.read(mask, _DEPTH), rows) for name, mask in masks_of(model.num_layers).items()}


def prices(num_layers: int) -> dict[str, CostModel]:
    """Of the proving ground's machines, where verifications of more than 16 tokens cost what the line through the costs
    of 12 and 16 says; and of the measured one with verifications as dear as in `studies/smollm2`, by packed matrices.
    """
    found = {}
    for name, table in COSTS.items():
        cost = table.model(num_layers)
        known = cost.verify_s
        slope = (known[-1] - known[-5]) / 4
        most = max(GAMMAS) * (1 + max(NUM_SIBLINGS))
        further = [known[-1] + slope * i for i in range(1, most - len(known) + 2)]
        found[name] = replace(cost, verify_s=(*known, *further))
    packed = json.loads((STUDIES / "smollm2" / "summary.json").read_text())["costs"]["last"]["verify_s"]
    shares = np.array(packed) / packed[0]
    found["cpu_packed"] = replace(found["cpu"], verify_s=tuple((found["cpu"].verify_s[0] * shares).tolist()))
    return found


def best_on(
    cost: CostModel, drafts: Mapping[str, Drafts], counts: Sequence[int], thresholds: Sequence[float]
) -> dict[str, Any]:
    """The mask, setting, number of siblings and their threshold with the best predicted speedup at these prices, as far
    as these go."""
    grid = Settings.grid(GAMMAS, THRESHOLDS, [0.0])
    found = []
    for siblings, below, (name, one) in itertools.product(counts, thresholds, drafts.items()):
        fitting = grid.select(np.flatnonzero(grid.gamma * (1 + siblings) < len(cost.verify_s)))
        logs = one.log_speedups(cost, replace(fitting, siblings=siblings, sibling_threshold=below))
        i = int(logs.argmax())
        chosen = {"siblings": siblings, "sibling_threshold": below, "mask": name, "gamma": int(fitting.gamma[i])}
        chosen |= {"draft_threshold": float(fitting.draft_threshold[i])}
        found.append({"speedup": float(np.exp(logs[i])), **chosen})
    return max(found, key=lambda one: one["speedup"])


def timed_configs(model: LayerSkipModel, weights: Path | None) -> dict[str, DecodeConfig]:
    """By drafter. Raises: ValueError or OSError for weights that are not for this model."""
    exit_mask = SkipMask.early_exit(model.num_layers, TIMED_EXIT)
    found = {f"exit after {TIMED_EXIT}": DecodeConfig(skip_mask=exit_mask, gamma=TIMED_GAMMA)}
    if weights is not None:
        own = describe_weights(weights)
        none = SkipMask.none(model.num_layers)
        found[own.drafter] = DecodeConfig(drafter=own.drafter, skip_mask=none, gamma=TIMED_GAMMA, draft_weights=own)
        model.check_config(found[own.drafter])
    return found


def open_study(folder: Path) -> tuple[StudySpec, LayerSkipModel, list[EncodedPrompt], list[EncodedPrompt]]:
    """A study's settings, its model on as many threads as they say, its tuning and its held-out prompts."""
    spec, _ = load_spec({}, str(folder), demo=folder)
    model = load_model(spec)
    tuning, held_out = (
        encode_prompts(one, model, room=spec.max_new_tokens) for one in load_prompts(spec.prompts, spec.held_out)
    )
    return spec, model, tuning, held_out


def timed(ways: Sequence[tuple[ModelDecoder, DecodeConfig]], prompts: Sequence[Sequence[int]], repeats: int) -> Any:
    """[What was decoded in each way], in turns with the first's plain decoding and with one another, prompt by prompt;
    the order turns from one to the next. Rates and ratios are medians of a prompt's repeats; `over_none` is to the
    first way.

    Cost: repeats x prompts x one decoding more than there are ways, and a pass over two prompts before.
    """
    decoder, first = ways[0]
    ways = [(decoder, DecodeConfig.plain(first.skip_mask.num_layers)), *ways]
    num_ways = len(ways)
    rates = np.zeros((repeats, len(prompts), num_ways))
    accepted, rounds, identical = np.zeros((3, num_ways), dtype=np.int64)
    for decoder, config in ways:
        for place, prompt in enumerate(prompts[:2]):
            decoder.decode(prompt, config, place)
    for repeat, (place, prompt) in itertools.product(range(repeats), enumerate(prompts)):
        outputs = {}
        for way in np.roll(np.arange(num_ways), repeat + place).tolist():
            decoder, config = ways[way]
            outputs[way] = decoder.decode(prompt, config, place)
            rates[repeat, place, way] = outputs[way].stats.tokens_per_s or np.nan
        for way, one in outputs.items():
            accepted[way] += one.stats.num_accepted
            rounds[way] += one.stats.num_rounds
            identical[way] += one.ids == outputs[0].ids
    known = np.isfinite(rates).all(axis=(0, 2))  # a text of one token has no rate
    rates = rates[:, known]
    return [
        {
            "mean_accepted_length": float(1 + accepted[way] / max(1, rounds[way])),
            "tokens_per_s": geometric_mean(np.median(rates[:, :, way], axis=0).tolist()),
            "speedup": _ratios(rates[:, :, way] / rates[:, :, 0]),
            "over_none": _ratios(rates[:, :, way] / rates[:, :, 1]),
            "num_identical": int(identical[way]),
            "num_outputs": repeats * len(prompts),
        }
        for way in range(1, num_ways)
    ]


def _ratios(ratios: NDArray[np.float64]) -> dict[str, Any]:
    """Of (repeats, prompts): mean and interval over prompts, and what it is made of."""
    by_prompt = np.median(ratios, axis=0).tolist()
    interval = ratio_interval(by_prompt, seed=0)
    ends = None if interval is None else [interval.low, interval.high]
    return {"mean": geometric_mean(by_prompt), "interval": ends, "raw": " ".join(f"{one:.4f}" for one in ratios.flat)}


def timed_cells(way: Mapping[str, Any]) -> list[str]:
    """Of one of `timed`'s ways the tokens a second, the speedup with its interval, and how many outputs are plain
    decoding's."""
    ends = way["speedup"]["interval"]
    more = f"{way['speedup']['mean']:.2f}" + ("" if ends is None else f" ({ends[0]:.2f}..{ends[1]:.2f})")
    return [f"{way['tokens_per_s']:.1f}", more, f"{way['num_identical']} of {way['num_outputs']}"]


def timed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One drafter and number of siblings a row."""
    told = []
    for one in rows:
        for by in one["by_siblings"]:
            more = by["over_none"]
            ends = "" if more["interval"] is None else " ({:.3f}..{:.3f})".format(*more["interval"])
            told.append(
                [
                    f"{one['regime']}, {one['drafter']}, {_branching(by)}",
                    f"{by['mean_accepted_length']:.2f}",
                    f"{by['tokens_per_s']:.1f}",
                    f"{by['speedup']['mean']:.3f}",
                    f"{more['mean']:.3f}{ends}" if by["siblings"] else "",
                    f"{by['num_identical']} of {by['num_outputs']}",
                ]
            )
    head = ("regime, drafter, siblings", "mean accepted length", "tokens/s", "speedup", "over none", "identical")
    return f"Decoded at gamma {TIMED_GAMMA}:\n\n{markdown_table(head, told)}\n"


def _branching(by: Mapping[str, Any]) -> str:
    below = by["sibling_threshold"]
    return str(by["siblings"]) if below == 1.0 else f"{by['siblings']} below {below:g}"


def tables(record: Mapping[str, Any]) -> str:
    """What was decoded, rounds, then machines."""
    header = ("regime, mask, gamma", *(f"{count} siblings" for count in range(MAX_SIBLINGS + 1)))
    rounds = [
        [f"{one['regime']}, {one['mask']}, {one['gamma']}", *(f"{value:.2f}" for value in one["mean_accepted_length"])]
        for one in record["rounds"]
    ]
    text = timed_table(record["timed"])
    text += f"Mean accepted length, tokens a round:\n\n{markdown_table(header, rounds)}\n"
    best = [
        [f"{one['regime']}, {one['machine']}"]
        + [f"{by['speedup']:.3f} ({by['mask']}, gamma {by['gamma']}, {_branching(by)})" for by in one["best"].values()]
        for one in record["machines"]
    ]
    head = ("regime, machine", "no siblings", *WHERE)
    return text + f"Best predicted speedup:\n\n{markdown_table(head, best)}"


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=48, help="of the demo's tuning prompts")
    parser.add_argument("--new-tokens", type=int, default=48, help="most tokens of a continuation")
    parser.add_argument("--timed-prompts", type=int, default=16, help="of these that are decoded for their time")
    parser.add_argument("--repeats", type=int, default=2, help="of decoding each")
    parser.add_argument(
        "--draft-weights",
        type=Path,
        default=EAGLE if EAGLE.is_dir() else None,
        help="folder of weights that draft too (default: those of studies.eagle.make_weights, if they are there)",
    )
    parser.add_argument("--out", type=Path, default=ENGINE, help="folder for siblings.json and siblings.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, num_prompts=1, new_tokens=2, timed_prompts=1, repeats=1)
    check_folders(arguments, "out")
    torch.set_num_threads(1)
    model = LayerSkipModel.from_pretrained(DEMO / "model", device="cpu", dtype="float32", engine="fused")
    told = read_prompts(DEMO / "tuning.jsonl")[: arguments.num_prompts]
    prompts = [encode_prompt(one, model, room=arguments.new_tokens) for one in told]
    record: dict[str, Any] = {
        "num_prompts": len(prompts),
        "new_tokens": arguments.new_tokens,
        "timed_gamma": TIMED_GAMMA,
        "repeats": arguments.repeats,
        "timed": [],
        "rounds": [],
        "machines": [],
    }
    configs = timed_configs(model, arguments.draft_weights)
    for regime, params in REGIMES.items():
        decoder = ModelDecoder(model, arguments.new_tokens, params)
        for name, config in configs.items():
            say(f"decoding {regime} text, {name}")
            branched = [{"siblings": count, "sibling_threshold": below} for count, below in TIMED_SIBLINGS]
            ways = [(decoder, config.model_copy(update=one)) for one in branched]
            found = timed(ways, prompts[: arguments.timed_prompts], arguments.repeats)
            by_siblings = [told | one for told, one in zip(branched, found, strict=True)]
            record["timed"].append({"regime": regime, "drafter": name, "by_siblings": by_siblings})
        say(f"reading {regime} text")
        drafts = read(model, params, prompts, arguments.new_tokens)
        for name, one in drafts.items():
            for gamma in SHOWN_GAMMAS:
                lengths = [one.mean_accepted_length(gamma, count) for count in range(MAX_SIBLINGS + 1)]
                row = {"regime": regime, "mask": name, "gamma": gamma, "mean_accepted_length": lengths}
                record["rounds"].append(row)
        for name, cost in prices(model.num_layers).items():
            best = {"none": best_on(cost, drafts, (0,), (1.0,))}
            best |= {where: best_on(cost, drafts, NUM_SIBLINGS, below) for where, below in WHERE.items()}
            record["machines"].append({"regime": regime, "machine": name, "best": best})
    finish(arguments.out / "siblings.json", facts(arguments.command) | record, tables(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
