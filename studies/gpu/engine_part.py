"""Part A of the GPU study: the engines on random weights of real shapes, so that nothing has to be trained first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from studies.gpu.runner import Job, Step

if TYPE_CHECKING:
    import torch

    from layerskip import LayerSkipModel

T = TypeVar("T")

ENGINES = ("cuda_graph", "fused", "eager")
DAMPING = 0.4
"""Until `speedup` chooses others: a draft of half the layers is accepted some five times in six."""
_BOUNDS_S = {
    "plain": 100.0,
    "rounds": 60.0,
    "speedup": 90.0,
    "generate": 60.0,
    "compiled": 150.0,
    "profile": 40.0,
    "identity": 60.0,
    "ties": 60.0,
    "recordings": 60.0,
    "contexts": 60.0,
    "attention": 30.0,
    "auto": 60.0,
}
"""The steps in the order of what convinces most, and the most seconds of each."""
_LEFT_OUT = {"3b": ("identity", "auto"), "8b": ("identity", "ties", "recordings", "auto")}
"""What another size has shown already, or what takes long to load once more."""


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


class EnginePart:
    """See `runner.Part`."""

    name = "a"

    def __init__(self, size: str) -> None:
        self.size = size
        self._subject: Subject | None = None

    def steps(self) -> Sequence[Step]:
        left_out = _LEFT_OUT.get(self.size, ())
        return [Step(name, bound_s) for name, bound_s in _BOUNDS_S.items() if name not in left_out]

    def facts(self) -> dict[str, Any]:
        import torch

        from layerskip.command_line.cli import quiet_libraries
        from studies.gpu.machine import copy_bandwidth, free_memory, machine_facts, study_device

        quiet_libraries()
        device = study_device()
        if device.type == "cpu" and self.size != "tiny":
            raise RuntimeError(f"part a at size {self.size} needs a CUDA device, torch {torch.__version__} sees none")
        if device.type == "cpu":
            torch.set_num_threads(1)  # more would wait for each other longer than a tiny model computes
        new_tokens, repeats = (8, 1) if self.size == "tiny" else (64, 3)
        self._subject = Subject(self.size, device, torch.bfloat16, new_tokens, repeats)
        facts = machine_facts() | {"copy_bytes_per_s": copy_bandwidth(device)}
        free_memory()
        return facts

    def moment(self) -> dict[str, Any]:
        from studies.gpu.machine import moment

        return moment()

    def is_sound(self) -> bool:
        from studies.gpu.machine import device_is_sound

        if self._subject is not None:
            self._subject.forget()  # what a failed step has left half done
        return device_is_sound()

    def run(self, step: str, job: Job) -> None:
        from studies.gpu import inside, sameness, speed

        assert self._subject is not None, "facts() comes first"
        functions: dict[str, Callable[[Subject, Job], None]] = {
            "plain": speed.plain,
            "rounds": speed.rounds,
            "speedup": speed.speedup,
            "generate": speed.generate,
            "compiled": speed.compiled,
            "contexts": speed.contexts,
            "auto": inside.automatic,
            "attention": inside.attention,
            "profile": inside.profiles,
            "recordings": inside.recordings,
            "identity": sameness.identity,
            "ties": sameness.ties,
        }
        functions[step](self._subject, job)
