"""How one forward is executed. Plain and speculative decoding always share one engine."""

from layerskip.engines.base import Engine
from layerskip.engines.eager import EagerEngine

__all__ = ["EagerEngine", "Engine"]
