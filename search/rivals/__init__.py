"""Published ways to choose a mask, each as a proposer: what `search.compare` sets beside the study's own."""

from search.rivals.registry import STRATEGIES, StrategyInfo

__all__ = ["STRATEGIES", "StrategyInfo"]
