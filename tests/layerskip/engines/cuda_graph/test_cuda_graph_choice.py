"""When the CUDA-graph engine is taken, what it records, and what else runs on its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layerskip.analysis.teacher_forcing.choice import make_teacher_forcing
from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.engines import EagerEngine, check_agreement, choice, make_engine
from layerskip.engines.compiled import CompiledFunctions
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean import weight_layout
from layerskip.engines.recording import sync_watch
from layerskip.engines.recording.graph_pool import Replay, RerunRecorder
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from tests.layerskip import zoo
from tests.layerskip.tape import TapeRecorder, engine_of, graph_model

pytestmark = pytest.mark.usefixtures("without_kernels")
WITHOUT = "; not compiled for this CPU: no C++ compiler"


def test_on_a_cpu_it_is_refused_in_one_line_and_auto_does_not_try() -> None:
    adapter = ModelAdapter(zoo.build("llama"))
    with pytest.raises(ValueError, match="engine cuda_graph: needs a model on a CUDA device, got cpu"):
        make_engine("cuda_graph", adapter)
    assert "cuda_graph" not in make_engine("auto", adapter).reason


@pytest.fixture
def has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_has_graphs", lambda _device: True)
    monkeypatch.setattr(choice, "CudaRecorder", lambda _device: TapeRecorder())


@pytest.mark.usefixtures("has_graphs")
def test_auto_takes_the_fastest_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, engines = ModelAdapter(zoo.build("llama")), []
    for times in ({"fused": 2.0, "cuda_graph": 1.0, "eager": 3.0}, {"fused": 1.0, "cuda_graph": 2.0, "eager": 3.0}):

        def measured(engine: Any, _: float, times: dict[str, float] = times) -> float:
            engines.append(engine)
            return times[engine.name]

        monkeypatch.setattr(choice, "_decode_and_verify_ms", measured)
        taken = make_engine("auto", adapter)
        assert taken.engine.name == min(times, key=lambda name: times[name])
        expected = ", ".join(f"{ms:.2f} ms {name}" for name, ms in times.items())
        recorded = "; lean layers" if taken.engine.name == "cuda_graph" else ""
        assert taken.reason == f"one token and then four take {expected}{recorded}{WITHOUT}"
        fused, graph, _ = engines[-3:]
        assert graph.lean is fused  # one copy of the weights
    assert len(engines[1].pool) > 0  # the one in use keeps what it has recorded
    assert len(engines[4].pool) == 0


@pytest.mark.usefixtures("has_graphs")
def test_the_models_own_modules_serve_where_lean_layers_do_not() -> None:
    taken = make_engine("cuda_graph", ModelAdapter(zoo.build("gemma2")))
    assert taken.reason.startswith("asked for; the model's own modules (engine fused: supports Llama")
    assert make_engine("cuda_graph", ModelAdapter(zoo.build("llama"))).reason == "asked for; lean layers"
    automatic = make_engine("auto", ModelAdapter(zoo.build("bloom")))
    assert automatic.engine.name == "eager"
    assert "engine cuda_graph: BloomForCausalLM cannot be told" in automatic.reason


@pytest.mark.usefixtures("has_graphs")
def test_work_that_cannot_be_recorded_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(choice, "CudaRecorder", lambda _device: Refuses())
    adapter = ModelAdapter(zoo.build("llama"))
    with pytest.raises(UnsupportedModelError, match=r"recording failed: .* when stream is capturing$"):
        make_engine("cuda_graph", adapter)
    taken = make_engine("auto", adapter)
    assert taken.engine.name in ("fused", "eager")
    assert "recording failed" in taken.reason


class GroupedProductsWait(TorchDispatchMode):
    """As torch's own watch on a Hopper GPU: all but bfloat16's grouped products copy the groups' sizes to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


@zoo.each(("mixtral", "qwen3-moe", "gpt-oss"))
def test_a_mixture_of_experts_that_waits_is_refused_before_anything_is_recorded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its capture used to be tried, and failed inside one operator with an error about the stream.
    model = zoo.build(name)
    monkeypatch.setattr(sync_watch, "_watched_by_torch", GroupedProductsWait)
    with pytest.raises(UnsupportedModelError) as told:
        ModuleExecutor(ModelAdapter(model))
    assert str(told.value).startswith(f"engine cuda_graph: {type(model).__name__}: _grouped_mm waits for the device: ")
    assert str(told.value).endswith("(load the model in bfloat16)")
    ModuleExecutor(ModelAdapter(model.to(torch.bfloat16)))


@pytest.mark.usefixtures("has_graphs")
def test_a_recording_that_fails_while_it_is_timed_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(engine: Any, _: float) -> float:
        if engine.name == "cuda_graph":
            raise RuntimeError("CUDA error: out of memory")
        return 1.0

    monkeypatch.setattr(choice, "_decode_and_verify_ms", measured)
    taken = make_engine("auto", ModelAdapter(zoo.build("llama")))
    assert taken.engine.name == "fused"
    assert taken.reason.endswith(f"eager; engine cuda_graph: recording failed: CUDA error: out of memory{WITHOUT}")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_has_graphs", lambda _device: True)
    monkeypatch.setattr(choice, "CudaRecorder", lambda _device: RerunRecorder())
    monkeypatch.setattr(choice, "_compiles", lambda _device: True)
    monkeypatch.setattr(choice, "CompiledFunctions", lambda: CompiledFunctions("eager"))


def is_compiled(engine: Any) -> bool:
    return engine.executor.compiled is not None


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    ("compiled_ms", "most_s", "expected"),
    [(1.5, 60.0, "lean layers, compiled"), (1.96, 60.0, "lean layers, not compiled"), (1.5, 0.0, "lean layers, not c")],
    ids=["faster", "hardly faster", "takes too long to compile"],
)
def test_layers_are_compiled_where_that_is_faster_and_affordable(
    monkeypatch: pytest.MonkeyPatch, compiled_ms: float, most_s: float, expected: str
) -> None:
    monkeypatch.setattr(choice, "_MOST_COMPILE_S", most_s)
    monkeypatch.setattr(choice, "_decode_and_verify_ms", lambda engine, *_: compiled_ms if is_compiled(engine) else 2.0)
    taken = make_engine("cuda_graph", ModelAdapter(zoo.build("llama")))
    assert taken.reason.startswith(f"asked for; {expected}")
    assert f"{compiled_ms:.2f} ms compiled, 2.00 ms as they are" in taken.reason
    assert is_compiled(taken.engine) == (expected == "lean layers, compiled")


@pytest.mark.usefixtures("compiles")
def test_auto_times_the_better_of_compiled_and_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_MOST_COMPILE_S", 60.0)
    times = {"fused": 3.0, "eager": 4.0}
    monkeypatch.setattr(
        choice, "_decode_and_verify_ms", lambda one, *_: times.get(one.name) or (1.0 if is_compiled(one) else 2.0)
    )
    taken = make_engine("auto", ModelAdapter(zoo.build("llama")))
    assert taken.reason.startswith("one token and then four take 3.00 ms fused, 1.00 ms cuda_graph, 4.00 ms eager; ")
    assert "lean layers, compiled: 1.00 ms compiled, 2.00 ms as they are" in taken.reason
    assert taken.engine.num_preparations > 0


@pytest.mark.usefixtures("compiles")
def test_layers_that_cannot_be_compiled_or_may_not_be_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_decode_and_verify_ms", lambda engine, *_: 0.1 if is_compiled(engine) else 2.0)
    adapter = ModelAdapter(zoo.build("llama"))
    monkeypatch.setattr(choice, "CompiledFunctions", lambda: CompiledFunctions("no such backend"))
    taken = make_engine("cuda_graph", adapter)
    assert taken.reason.startswith("asked for; lean layers, as compiling them failed: ")
    assert not is_compiled(taken.engine)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # as TORCHDYNAMO_DISABLE=1 has it
    taken = make_engine("cuda_graph", adapter)
    assert taken.reason == "asked for; lean layers; torch.compile is switched off"
    assert not is_compiled(taken.engine)


def test_weights_by_outputs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "_SMALLEST_BYTES", 0)
    for seconds, told in (([1.0, 1.0, 0.1, 0.1, *[1.0] * 4], "; weights by outputs"), ([1.0] * 8, "")):
        monkeypatch.setattr(weight_layout, "Stopwatch", lambda _device, seconds=seconds: lambda _works: seconds)
        assert make_engine("fused", ModelAdapter(zoo.build("llama"))).reason == f"asked for{told}{WITHOUT}"


def test_a_length_frozen_into_a_recording_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that works out positions from the Python length is right once and wrong at every replay."""
    model = graph_model("llama")
    executor, step = engine_of(model).executor, LeanExecutor.step

    def frozen(self: Any, ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        length = self._cache.length
        return step(self, ids, torch.arange(length, length + len(ids)), *rest)

    check_agreement(model.engine, EagerEngine(model.adapter), model.adapter)
    engine_of(model).close()
    monkeypatch.setattr(type(executor), "step", frozen)
    with pytest.raises(UnsupportedModelError, match="its logits differ from the model's"):
        check_agreement(model.engine, EagerEngine(model.adapter), model.adapter)


def test_teacher_forcing_takes_the_lean_layers() -> None:
    model = graph_model("llama")
    prompt = zoo.prompt_of(5)
    texts = [ForcedText(list(prompt), list(zoo.greedy_reference("llama", prompt)))]
    forcing = make_teacher_forcing(model, texts)
    assert type(forcing).__name__ == "LayerwiseForcing"
    assert isinstance(engine_of(model).lean, FusedEngine)
