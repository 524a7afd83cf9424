"""Published ways to choose a mask, each as a proposer: what `search.compare` sets beside the study's own."""

from search.rivals.common import Setup
from search.rivals.registry import STRATEGIES, StrategyInfo, departures_table

__all__ = ["STRATEGIES", "Setup", "StrategyInfo", "departures_table"]
