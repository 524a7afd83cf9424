"""python -m studies.engine.trees: what trees of trained weights' drafts hold beside chains, and where they pay."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import layerskip.rounds.sampling
from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.teacher_forcing import DraftReadings, ForcedText, TreeReadings, make_teacher_forcing
from layerskip.command_line.cli import OneLineParser, check_folders, check_least
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.draft_weights import describe_weights
from layerskip.machine.host import device_names
from layerskip.prompts import encode_prompt, read_prompts
from layerskip.rounds.sampling import SamplingParams
from search.measure.decoder import ModelDecoder
from search.predict.costs import CostModel
from search.predict.replay import Counts, Settings, TextRows, replay
from studies.engine.siblings import DEMO, EAGLE, prices, timed
from studies.results import ENGINE, facts, finish, markdown_table, run_study, say

PROG = "studies.engine.trees"
REGIMES = {
    "greedy": SamplingParams(),
    "t0.7": SamplingParams(do_sample=True, temperature=0.7, top_k=0),
    "t1": SamplingParams(do_sample=True, temperature=1.0, top_k=0),
}
SIZES = (4, 8, 12, 16, 24)
"""Drafted tokens that a round verifies."""
GAMMA = 12
"""As deep as trees and chains go here."""
THRESHOLDS, TREE_THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8), (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
STEEPNESS = (0.5, 1.0, 2.0)
"""Times what `Sampler.likeliest` has."""
TIMED = ((4, 0, 0.0), (4, 1, 0.0), (4, 8, 0.0), (8, 8, 0.05), (8, 16, 0.05), (8, 24, 0.0))
"""(Gamma, siblings if it is 1 or else tree_tokens, draft_threshold) of what is decoded."""


class Drafts:
    """What weights draft along the texts of one regime."""

    def __init__(self, model: LayerSkipModel, weights: DraftWeights, texts: Sequence[ForcedText], params: Any) -> None:
        self._forcing, self._weights = make_teacher_forcing(model, texts, params), weights
        new_tokens = max(len(one.continuation_ids) for one in texts)
        self.rows = TextRows(np.asarray(self._forcing.lengths), np.asarray(self._forcing.target_probs), new_tokens)
        self.chain = self._forcing.read(weights, GAMMA - 1)
        self.tree = self.trees()

    def trees(self) -> TreeReadings:
        """Read anew."""
        return self._forcing.read_trees(self._weights.branching(SIZES[-1]), GAMMA)

    def counts(self, reading: DraftReadings | TreeReadings, grid: Settings, cost: CostModel | None = None) -> Counts:
        return replay(reading, self.rows, grid, None if cost is None else cost.verify_s)

    def lengths(self, reading: DraftReadings | TreeReadings, grid: Settings) -> NDArray[np.float64]:
        """(S,): tokens a round, what is cut at a text's end not counted."""
        tokens = (self.rows.lengths - 1).sum()
        found: NDArray[np.float64] = tokens / (self.counts(reading, grid).rounds.sum(1))
        return found


def tokens_a_round(drafts: Drafts) -> dict[str, dict[int, float]]:
    """Of the best chain, the best chain with siblings and the tree, with so many tokens verified; of trees also levels
    a round."""
    found: dict[str, dict[int, float]] = {"chain": {}, "siblings": {}, "tree": {}, "levels of the tree": {}}
    for size in SIZES:
        best = {0: 0.0}
        for siblings in range(4):
            gammas = [gamma for gamma in range(1, GAMMA + 1) if gamma * (1 + siblings) <= size]
            if gammas:
                grid = replace(Settings.grid(gammas, [0.0], [0.0]), siblings=siblings)
                best[siblings] = float(drafts.lengths(drafts.chain, grid).max())
        found["chain"][size], found["siblings"][size] = best[0], max(best.values())
        grid = replace(Settings.grid([GAMMA], [0.0], [0.0]), tree_tokens=size)
        found["tree"][size] = float(drafts.lengths(drafts.tree, grid)[0])
        counts = drafts.counts(drafts.tree, grid)
        found["levels of the tree"][size] = float(counts.drafted.sum() / counts.rounds.sum())
    return found


def best_on(cost: CostModel, drafts: Drafts) -> dict[str, dict[str, Any]]:
    """Of chains, chains with siblings and trees the best predicted speedup, and its setting.

    A draft step costs what a mask that keeps one layer does; a level of a tree that of its tokens on average, dearer by
    as much as verifying so many is.
    """
    step = cost.fixed_s + cost.attention_s[0] + cost.mlp_s[0]
    limit = len(cost.verify_s) - 1
    best: dict[str, dict[str, Any]] = {}
    grids = [("chain", drafts.chain, _grid(THRESHOLDS, limit))]
    grids += [("siblings", drafts.chain, replace(_grid(THRESHOLDS, limit // (1 + n)), siblings=n)) for n in (1, 2, 3)]
    grids += [("tree", drafts.tree, replace(_grid(TREE_THRESHOLDS, GAMMA), tree_tokens=n)) for n in SIZES]
    for name, reading, grid in grids:
        counts = drafts.counts(reading, grid, cost)
        draft_s = np.full(counts.drafted.shape, step)
        if grid.tree_tokens:
            rows = grid.tree_tokens * counts.rounds / np.maximum(counts.drafted, 1)
            draft_s = step * np.interp(rows, np.arange(1, limit + 2), cost.verify_s) / cost.verify_s[0]
        seconds = counts.drafted * draft_s + counts.verify_s + counts.target_only * cost.verify_s[0]
        logs = np.log((drafts.rows.lengths - 1) * cost.verify_s[0] / seconds).mean(axis=1)
        i = int(logs.argmax())
        setting = {"gamma": int(grid.gamma[i]), "draft_threshold": float(grid.draft_threshold[i])}
        setting |= {"siblings": grid.siblings} if name == "siblings" else {}
        setting |= {"tree_tokens": grid.tree_tokens} if name == "tree" else {}
        if name not in best or np.exp(logs[i]) > best[name]["speedup"]:
            best[name] = {"speedup": float(np.exp(logs[i])), **setting}
    return best


def _grid(thresholds: Sequence[float], most: int) -> Settings:
    return Settings.grid(list(range(1, min(most, GAMMA) + 1)), thresholds, [0.0])


@contextmanager
def steepness(factor: float) -> Iterator[None]:
    """What `Sampler.likeliest` has, times this."""
    module: Any = layerskip.rounds.sampling
    before = module._STEEPNESS
    try:
        module._STEEPNESS = factor * before
        yield
    finally:
        module._STEEPNESS = before


def timed_configs(num_layers: int, weights: DraftWeights) -> dict[str, DecodeConfig]:
    """By name."""
    found = {}
    for gamma, branches, threshold in TIMED:
        tree = branches if branches > 1 else None
        name = f"tree of {tree}" if tree else f"chain, {branches} siblings" if branches else "chain"
        config = DecodeConfig(
            drafter=weights.drafter,
            skip_mask=SkipMask.none(num_layers),
            gamma=gamma,
            draft_threshold=threshold,
            siblings=0 if tree else branches,
            draft_weights=weights.branching(tree),
        )
        found[f"{name}, gamma {gamma}" + (f", threshold {threshold:g}" if threshold else "")] = config
    return found


def tables(record: Mapping[str, Any]) -> str:
    """What was decoded, rounds, the constant, then machines."""
    decoded = [
        [
            f"{regime}, {name}",
            f"{one['mean_accepted_length']:.2f}",
            f"{one['tokens_per_s']:.1f}",
            f"{one['speedup']['mean']:.3f}",
            "{:.3f} ({:.3f}..{:.3f})".format(one["over_none"]["mean"], *(one["over_none"]["interval"] or (1, 1))),
            f"{one['num_identical']} of {one['num_outputs']}",
        ]
        for regime, by in record["regimes"].items()
        for name, one in by["timed"].items()
    ]
    head = ("regime, drafts", "mean accepted length", "tokens/s", "speedup", "over the chain", "identical")
    text = (
        f"Decoded on {record['device']} in {record['dtype']}, of a CPU one thread:\n\n{markdown_table(head, decoded)}\n"
    )
    for title, key in (("Tokens a round", "tokens_a_round"), ("With other steepness, tokens a round", "steepness")):
        rows = [
            [f"{regime}, {name}", *(f"{value:.2f}" for value in found.values())]
            for regime, by in record["regimes"].items()
            for name, found in by[key].items()
        ]
        text += f"{title}, by tokens verified:\n\n{markdown_table(('regime', *map(str, SIZES)), rows)}\n"
    rows = [
        [f"{regime}, {machine}", *(f"{one['speedup']:.3f} ({_told(one)})" for one in best.values())]
        for regime, by in record["regimes"].items()
        for machine, best in by["machines"].items()
    ]
    return text + "Best predicted speedup:\n\n" + markdown_table(("regime, machine", "chain", "siblings", "tree"), rows)


def _told(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in one.items() if name != "speedup")


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--model", default=str(DEMO / "model"), help="the model")
    parser.add_argument("--draft-weights", type=Path, default=EAGLE, help="an eagle layer for it")
    parser.add_argument("--prompts", type=Path, default=DEMO.parent / "eagle" / "tuning.jsonl", help="a .jsonl file")
    parser.add_argument("--num-prompts", type=int, default=32, help="of these")
    parser.add_argument("--new-tokens", type=int, default=64, help="most tokens of a continuation")
    parser.add_argument("--device", default="cpu", help="where the model is")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--engine", choices=("fused", "cuda_graph"), default="fused", help="that decodes [fused]")
    parser.add_argument("--repeats", type=int, default=2, help="of decoding each")
    parser.add_argument("--out", type=Path, default=ENGINE, help="folder for trees.json and trees.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_study(PROG, build_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, num_prompts=1, new_tokens=2, repeats=1)
    check_folders(arguments, "out")
    torch.set_num_threads(1)
    model = LayerSkipModel.from_pretrained(
        arguments.model, device=arguments.device, dtype=arguments.dtype, engine=arguments.engine, looks_for_config=False
    )
    weights = describe_weights(arguments.draft_weights)
    told = read_prompts(arguments.prompts)[: arguments.num_prompts]
    prompts = [tuple(encode_prompt(one, model, room=arguments.new_tokens)) for one in told]
    configs = timed_configs(model.num_layers, weights)
    model.check_config(next(iter(configs.values())))
    record: dict[str, Any] = {"num_prompts": len(prompts), "new_tokens": arguments.new_tokens}
    record |= {"device": device_names([model.device]), "dtype": arguments.dtype, "engine": arguments.engine}
    record["regimes"] = {}
    for regime, params in REGIMES.items():
        say(f"decoding {regime} text")
        decoder, plain = ModelDecoder(model, arguments.new_tokens, params), DecodeConfig.plain(model.num_layers)
        found = timed([(decoder, one) for one in configs.values()], prompts, arguments.repeats)
        say(f"reading {regime} text")
        texts = [ForcedText(one, decoder.decode(one, plain, seed).ids, seed) for seed, one in enumerate(prompts)]
        drafts = Drafts(model, weights, [one for one in texts if len(one.continuation_ids) > 1], params)
        steep = {}
        for factor in STEEPNESS:
            with steepness(factor):
                grids = [replace(Settings.grid([GAMMA], [0.0], [0.0]), tree_tokens=size) for size in SIZES]
                tree = drafts.trees()
                steep[f"times {factor:g}"] = {
                    size: float(drafts.lengths(tree, grid)[0]) for size, grid in zip(SIZES, grids, strict=True)
                }
        record["regimes"][regime] = {
            "timed": dict(zip(configs, found, strict=True)),
            "tokens_a_round": tokens_a_round(drafts),
            "steepness": steep,
            "machines": {name: best_on(cost, drafts) for name, cost in prices(model.num_layers).items()},
        }
    finish(arguments.out / "trees.json", facts(arguments.command) | record, tables(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
