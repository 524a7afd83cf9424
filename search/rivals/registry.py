"""The strategies that `search.compare` knows, by name; n-grams, which have no mask to choose, are a row beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from search.rivals.bayesian import DraftVerify, Swift
from search.rivals.blind import EarlyExitGrid, RandomSearch, RawTpe
from search.rivals.by_throughput import DynamicExit, LeaveOneOut
from search.rivals.common import Departure, Setup, WithRepeats
from search.rivals.hidden_states import Clasp, KnapSpec
from search.trials.proposals import Proposer

OURS = "ours"
WITH_SETTINGS = "+settings"
"""Ends the name of a rival that chooses masks alone: gamma and thresholds are the best predicted for each."""


@dataclass(frozen=True)
class StrategyInfo:
    """One way to choose masks."""

    name: str
    about: str
    """One line for people."""
    source: str
    """arXiv id or where else it comes from."""
    factory: Callable[[Setup], Proposer] | None
    """None for the study's own machinery, which `comparison.ours` sets up."""
    uses_states: bool = False
    """Whether it needs hidden states layer by layer, which not every engine gives."""
    with_settings: bool = False
    """See `WITH_SETTINGS`."""

    @property
    def departures(self) -> tuple[Departure, ...]:
        """Where it is not what its source has."""
        return getattr(self.factory, "DEPARTURES", ())

    def proposer(self, setup: Setup) -> Proposer:
        """The rival, measuring leaders again as ours does. Raises: ValueError for ours, which is none."""
        if self.factory is None:
            raise ValueError(f"strategy: must be a rival, got {self.name!r}")
        own = replace(setup, with_settings=self.with_settings)
        return WithRepeats(self.factory(own), own)


_RIVALS = (
    StrategyInfo("random", "every parameter uniform", "-", RandomSearch),
    StrategyInfo("raw-tpe", "Optuna's TPE on the raw bits, no warm start", "the seed of this project", RawTpe),
    StrategyInfo("draft-verify", "Gaussian process on relaxed bits, by measured speed", "2309.08168", DraftVerify),
    StrategyInfo("layerskip", "grid of exit layer and gamma, in random order", "2404.16710", EarlyExitGrid),
    StrategyInfo("del", "exit layer and gamma by expected tokens/s", "2504.05598", DynamicExit),
    StrategyInfo("swift", "fixed skip ratio, random and Bayesian steps by agreement", "2410.06916", Swift),
    StrategyInfo("clasp", "whole layers by dynamic programming on cosine", "2505.24196", Clasp, uses_states=True),
    StrategyInfo("knapspec", "sublayers by a knapsack of latency and cosine", "2602.20217", KnapSpec, uses_states=True),
    StrategyInfo("leave-one-out", "product of single-removal agreements per second saved", "-", LeaveOneOut),
)
STRATEGIES = {
    info.name: info
    for info in (
        StrategyInfo(OURS, "the default of search.run", "this project", None),
        *_RIVALS,
        *(
            replace(
                info,
                name=f"{info.name}{WITH_SETTINGS}",
                about=f"{info.about}; each mask at its best predicted setting",
                with_settings=True,
            )
            for info in _RIVALS
        ),
    )
}


def departures_table() -> str:
    """Markdown: where every published strategy departs from its paper, and which way that counts."""
    rows = [
        f"| {info.name} ({info.source}) | {one.what} | {one.effect} |" for info in _RIVALS for one in info.departures
    ]
    every = [
        "| all | leaders are measured again on further prompts as often as ours, and ranked by one rule | helps it |",
        "| all | no forecasts, towards which that rule draws what ours has measured | hurts it |",
        f"| all {WITH_SETTINGS} | gamma and thresholds by the predictor of `search.run` | helps it |",
    ]
    return "\n".join(["| strategy | departs from its paper | which |", "|---|---|---|", *rows, *every]) + "\n"
