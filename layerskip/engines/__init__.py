"""How one forward is executed. Plain and speculative decoding always share one engine."""

from layerskip.engines.base import Engine
from layerskip.engines.choice import EngineChoice, check_agreement, make_engine, tree_refusal
from layerskip.engines.eager import EagerEngine

__all__ = ["EagerEngine", "Engine", "EngineChoice", "check_agreement", "make_engine", "tree_refusal"]
