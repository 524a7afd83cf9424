"""The strategies that `search.compare` knows, by name; n-grams, which have no mask to choose, are a row beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from search.proposals import Proposer
from search.rivals.bayesian import DraftVerify, Swift
from search.rivals.blind import EarlyExitGrid, RandomSearch, RawTpe
from search.rivals.common import Hints
from search.rivals.hidden_states import Clasp, KnapSpec
from search.rivals.leave_one_out import LeaveOneOut
from search.space import SearchSpace

Factory = Callable[[SearchSpace, Hints, int], Proposer]
OURS = "ours"


@dataclass(frozen=True)
class StrategyInfo:
    """One way to choose masks."""

    name: str
    about: str
    """One line for people."""
    source: str
    """arXiv id or where else it comes from."""
    factory: Factory | None
    """(space, hints, seed) -> proposer; None for the study's own machinery, which `comparison.ours` sets up."""
    uses_states: bool = False
    """Whether it needs hidden states layer by layer, which not every engine gives."""


def _by_name(*infos: StrategyInfo) -> dict[str, StrategyInfo]:
    return {info.name: info for info in infos}


STRATEGIES = _by_name(
    StrategyInfo(OURS, "the default of search.run", "this project", None),
    StrategyInfo("random", "every parameter uniform", "-", lambda space, _hints, _seed: RandomSearch(space)),
    StrategyInfo(
        "raw-tpe",
        "Optuna's TPE on the raw bits, no warm start",
        "the seed of this project",
        lambda space, _hints, _seed: RawTpe(space),
    ),
    StrategyInfo(
        "draft-verify",
        "Gaussian process on relaxed bits, by measured speed",
        "2309.08168",
        lambda space, _hints, _seed: DraftVerify(space),
    ),
    StrategyInfo(
        "layerskip",
        "grid of exit layer and gamma, in random order",
        "2404.16710",
        lambda space, _hints, seed: EarlyExitGrid(space, seed),
    ),
    StrategyInfo("swift", "fixed skip ratio, random and Bayesian steps by agreement", "2410.06916", Swift),
    StrategyInfo(
        "clasp",
        "whole layers by dynamic programming on cosine",
        "2505.24196",
        lambda space, hints, _seed: Clasp(space, hints),
        uses_states=True,
    ),
    StrategyInfo(
        "knapspec",
        "sublayers by a knapsack of latency and cosine",
        "2602.20217",
        lambda space, hints, _seed: KnapSpec(space, hints),
        uses_states=True,
    ),
    StrategyInfo(
        "leave-one-out",
        "product of single-removal agreements per second saved",
        "-",
        lambda space, hints, _seed: LeaveOneOut(space, hints),
    ),
)
