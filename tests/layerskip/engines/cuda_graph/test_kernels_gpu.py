"""Kernels on a GPU: which serve, that their numbers are right, and compiled layers in real captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.engines import EagerEngine, check_agreement
from layerskip.engines.compiled import CompiledFunctions
from layerskip.engines.cuda_graph.attention import AttentionChoice, AttentionShape
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean import weight_layout as layout_module
from layerskip.engines.lean.linear import DenseLinear, Linear
from layerskip.engines.recording.recorder import CudaRecorder
from layerskip.engines.recording.stopwatch import Stopwatch
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.quantization import products
from layerskip.huggingface.quantization.products import GpuInt8Linear
from tests.layerskip import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 300])
def test_own_and_efficient_attention_serve_every_shape(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Kernels with wrong numbers are left out, so one that is timed is right. cuDNN's may be left out."""
    for num_keys in (8, 32):
        choice = AttentionChoice.on(CUDA)
        choice.measure(AttentionShape(32, num_keys, head_dim, frozenset({None, window}), dtype, CUDA), 4096)
        for (kernel, num_tokens, num_visible), seconds in sorted(choice.times.items()):
            print(
                f"{dtype} {num_keys} of {head_dim}: {kernel}, {num_tokens} over {num_visible}: {1e6 * seconds:.1f} us"
            )
        print(f"chosen: {choice.description}")
        for num_visible in (512, 1024, 2048, 4096):
            served = {name for name, _, visible in choice.times if visible == num_visible}
            assert served >= {"efficient", "math", "split keys"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 896), (28672, 4096), (37, 130)], ids=str)
def test_products_with_8_bit_weights_are_right_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, device=CUDA).to(dtype)
    linear, own = GpuInt8Linear(weight, weight[:, 0]), DenseLinear(weight.t(), weight[:, 0])
    for num_rows in (1, 5, 40):
        x, residual = torch.randn(num_rows, shape[1], device=CUDA), torch.randn(num_rows, shape[0], device=CUDA)
        x, residual = x.to(dtype), residual.to(dtype)
        rounded = linear._weight.double() * linear._scales.double()[:, None]
        expected = x.double() @ rounded.t() + weight[:, 0].double() + residual.double()
        off = (linear.add_to(residual, x).double() - expected).norm() / expected.norm()
        assert float(off) < 4 * max(torch.finfo(dtype).eps, 1e-3 * (num_rows > products._ROWS_OF_KERNEL))
    x = x[:1]
    assert torch.equal(linear(x), linear(x.repeat(5, 1))[:1])

    def twenty(product: Linear) -> Callable[[], None]:
        return lambda: [product(x) for _ in range(20)] and None

    times = Stopwatch(CUDA)([twenty(one) for one in (linear, own)])
    print(f"{dtype} {shape}: 8 bits {1e6 * times[0] / 20:.1f} us, as it is {1e6 * times[1] / 20:.1f} us")


@pytest.mark.parametrize("modules", [False, True], ids=["lean layers", "the model's modules"])
def test_drafts_with_8_bit_weights_are_captured(modules: bool) -> None:
    model = LayerSkipModel(zoo.build("qwen3").to(CUDA), engine="cuda_graph")
    if modules:
        model._engine = CudaGraphEngine(model.adapter, ModuleExecutor(model.adapter), CudaRecorder(CUDA))
    prompt, config = zoo.prompt_of(5), DecodeConfig(skip_mask=SkipMask.none(zoo.NUM_LAYERS).rounded(8), gamma=3)
    out = model.generate(prompt, config=config, max_new_tokens=16)
    assert tuple(out.ids) == tuple(
        model.generate(prompt, max_new_tokens=16, config=DecodeConfig.plain(zoo.NUM_LAYERS)).ids
    )
    assert out.stats.num_accepted > 0.5 * out.stats.num_drafted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3"])
def test_compiled_layers_are_captured_and_agree(name: str, dtype: torch.dtype) -> None:
    adapter = ModelAdapter(zoo.build(name).to(CUDA, dtype))
    functions = CompiledFunctions()
    executor = LeanExecutor(FusedEngine(adapter), compiled=functions)
    engine = CudaGraphEngine(adapter, executor, CudaRecorder(CUDA))
    check_agreement(engine, EagerEngine(adapter), adapter)
    print(f"seconds of each compilation: {', '.join(f'{one:.1f}' for one in functions.seconds)}")
    compiled, ids = engine.num_preparations, torch.tensor(zoo.prompt_of(5), device=CUDA)
    with engine.session(12):
        engine.forward(ids)
        engine.forward(ids[:1], SkipMask.from_layers(zoo.NUM_LAYERS, [1]))
    assert engine.num_preparations == compiled + 1  # a recording, nothing compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layouts_are_measured_and_agree(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(layout_module, "_SMALLEST_BYTES", 0)
    adapter = ModelAdapter(zoo.build("llama").to(CUDA, dtype))
    fused = FusedEngine(adapter)
    print(fused.maker.description)
    check_agreement(fused, EagerEngine(adapter), adapter)
