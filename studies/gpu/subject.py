"""Subject: the model that the steps of one process measure, on any of the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from layerskip import LayerSkipModel

T = TypeVar("T")

ENGINES = ("cuda_graph", "fused", "eager")
DAMPING = 0.4
"""Until `speedup` chooses others: a draft of half the layers is accepted some five times in six."""


@dataclass
class Subject:
    """What the steps of one process measure; a model is made when the first of them asks for it."""

    size: str
    device: torch.device
    dtype: torch.dtype
    num_new_tokens: int
    """Of every timed text."""
    repeats: int
    damping: float = DAMPING
    """Of the model at hand. Seconds do not depend on it."""
    _weights: Any = None
    _graph: LayerSkipModel | None = None

    @property
    def is_rehearsal(self) -> bool:
        return self.size == "tiny"

    def some(self, values: Sequence[T]) -> Sequence[T]:
        """All of them, or the first in a rehearsal, which finds broken steps and no numbers."""
        return values[:1] if self.is_rehearsal else values

    def weights(self) -> Any:
        """The Hugging Face model."""
        from studies.gpu.models import SHAPES, random_llama

        if self._weights is None:
            self._weights = random_llama(SHAPES[self.size], self.device, self.dtype, damping=self.damping)
        return self._weights

    def graph(self) -> LayerSkipModel:
        """On the graph engine, kept from step to step: compiling and recording anew would only cost time."""
        from studies.gpu.models import on_engine

        if self._graph is None:
            self._graph = on_engine(self.weights(), "cuda_graph")
        return self._graph

    def damp(self, damping: float) -> None:
        """From now on a model of this damping."""
        if damping != self.damping:
            self.forget()
            self.damping = damping

    def on(self, engine: str) -> LayerSkipModel:
        """On any engine; what the last one of another kind has left is freed before."""
        from studies.gpu.machine import free_memory
        from studies.gpu.models import on_engine

        if engine == "cuda_graph":
            return self.graph()
        free_memory()
        return on_engine(self.weights(), engine)

    def prompt(self, num_tokens: int = 96, seed: int = 0) -> tuple[int, ...]:
        from studies.gpu.models import SHAPES, random_prompt

        return random_prompt(SHAPES[self.size], num_tokens, seed)

    def forget(self) -> None:
        """Free all models."""
        from studies.gpu.machine import free_memory

        self._weights = self._graph = None
        free_memory()
