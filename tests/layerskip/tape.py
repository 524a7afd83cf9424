"""TapeRecorder: records tensor operations and replays them without the Python that made them, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerskip import LayerSkipModel
from layerskip.engines.cuda_graph.engine import CudaGraphEngine, GraphOptions
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import Recorder, Replay, warm_up
from tests.layerskip import zoo


class TapeRecorder:
    """A `Recorder` for the CPU that freezes what a capture freezes: addresses, Python numbers, the path taken.

    `copies` counts every tensor that a recording holds on to; `alive` the recordings not yet released.
    """

    def __init__(self, num_bytes: Callable[[int], int] = lambda _: 0) -> None:
        self._num_bytes = num_bytes
        self.recorded = 0
        self.alive = 0

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        warm_up(work, preserve)
        before = [tensor.clone() for tensor in preserve]
        tape = _Tape()
        with tape:
            work()
        for tensor, value in zip(preserve, before, strict=True):
            tensor.copy_(value)  # a capture runs nothing
        replay = _TapeReplay(tape.steps, self._num_bytes(self.recorded), self)
        self.recorded += 1
        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out


class _TapeReplay:
    def __init__(self, steps: list[tuple[Any, Any, Any, Any]], num_bytes: int, recorder: TapeRecorder) -> None:
        self._steps = steps
        self._recorder = recorder
        self.num_bytes = num_bytes
        recorder.alive += 1

    def __call__(self) -> None:
        assert self._steps, "replayed after its release"
        for func, args, kwargs, recorded in self._steps:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def release(self) -> None:
        assert self._steps, "released twice"
        self._steps = []
        self._recorder.alive -= 1


def graph_model(
    name: str, recorder: Recorder | None = None, *, modules: bool = False, **options: Any
) -> LayerSkipModel:
    """The shared model on an engine of its own; small sizes, so that short texts cross them."""
    lean = name in zoo.FUSED and name not in zoo.COMPILED and not modules
    model = LayerSkipModel(zoo.model_of(name), engine="eager")
    return on_graphs(model, recorder or TapeRecorder(), lean=lean, **options)


def on_graphs(model: LayerSkipModel, recorder: Recorder, *, lean: bool, **options: Any) -> LayerSkipModel:
    """The same model, now decoding on the CUDA-graph engine over lean layers or the model's own modules."""
    executor = LeanExecutor(FusedEngine(model.adapter)) if lean else ModuleExecutor(model.adapter)
    options = {"granule": 32, "min_visible": 16, **options}
    model._engine = CudaGraphEngine(model.adapter, executor, recorder, GraphOptions(**options))
    return model


def engine_of(model: LayerSkipModel) -> CudaGraphEngine:
    assert isinstance(model.engine, CudaGraphEngine)
    return model.engine
