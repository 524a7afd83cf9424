"""8-bit weights on a GPU: the kernel's numbers, by Triton's interpreter, which runs it on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, SkipMask
from layerskip.engines.lean import weight_layout
from layerskip.huggingface.quantization import modules as by_modules
from layerskip.huggingface.quantization import products
from layerskip.huggingface.quantization.products import GpuInt8Linear
from tests.layerskip import zoo
from tests.layerskip.tape import graph_model

IN_INT8 = SkipMask.none(zoo.NUM_LAYERS).rounded(8)
FEW, MANY = products._ROWS_OF_KERNEL, products._ROWS_OF_KERNEL + 3


pytest.importorskip("triton", reason="needs Triton, which torch's packages for GPUs bring")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, for which kernels are compiled: see test_kernels_gpu.py"
)


def by_hand(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """In float64, from the definition alone."""
    scales = weight.double().abs().amax(dim=1) / 127
    return x.double() @ ((weight.double() / scales[:, None]).round() * scales[:, None]).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (37, 130), (6, 2500)], ids=str)
@pytest.mark.parametrize("num_rows", [1, FEW, MANY])
def test_products_are_those_of_the_rounded_weights(dtype: torch.dtype, shape: tuple[int, int], num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(shape, generator=generator).to(dtype)
    weight[3] = 0.0
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    x = torch.randn(num_rows, 2 * shape[1], generator=generator).to(dtype)[:, : shape[1]]
    residual = torch.randn(num_rows, shape[0] + 5, generator=generator).to(dtype)[:, 5:]
    for biased in (False, True):
        linear = GpuInt8Linear(weight, bias if biased else None)
        expected = by_hand(weight, x).nan_to_num() + (bias.double() if biased else 0.0)
        assert linear.num_outputs == shape[0]
        for found, right in ((linear(x), expected), (linear.add_to(residual, x), expected + residual.double())):
            assert found.dtype == dtype
            off = float((found.double() - right).norm() / right.norm())
            assert off < 4 * torch.finfo(dtype).eps, "rounded once more in x's format where there are many rows"


def test_a_row_is_the_same_among_others() -> None:
    linear, x = GpuInt8Linear(torch.randn(37, 1500), None), torch.randn(FEW, 1500)
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


def test_a_large_matrix_is_rounded_and_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(50, 24), torch.randn(MANY, 24)
    whole = GpuInt8Linear(weight, None)
    monkeypatch.setattr(products, "_AT_ONCE", 24 * 7)
    parts = GpuInt8Linear(weight, None)
    assert torch.equal(whole._weight, parts._weight)
    torch.testing.assert_close(whole(x), parts(x))


def test_compiled_functions_keep_it_as_one_operation() -> None:
    linear, x, residual = GpuInt8Linear(torch.randn(40, 24), torch.randn(40)), torch.randn(1, 24), torch.randn(1, 40)
    operations: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda: linear.add_to(residual, 2 * x), fullgraph=True, dynamic=False, backend=backend)
    torch.testing.assert_close(compiled(), linear.add_to(residual, 2 * x))
    assert operations[1:] == ["layerskip.int8_product.default"]


@pytest.mark.parametrize("modules", [False, True], ids=["lean layers", "the model's modules"])
def test_drafts_by_it_are_recorded_and_the_output_is_the_models(modules: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> GpuInt8Linear:
        made.append(GpuInt8Linear(weight, bias))
        return made[-1]

    monkeypatch.setattr(by_modules, "int8_linear", linear)
    monkeypatch.setattr(weight_layout, "int8_linear", linear)
    model, prompt = graph_model("qwen3", modules=modules), zoo.prompt_of(5)
    # Whatever the shared model was rounded to before is another kind.
    monkeypatch.setattr(model.adapter, "_int8", by_modules.Int8Modules(model.adapter.layers, model.adapter.head))
    out = model.generate(prompt, config=DecodeConfig(skip_mask=IN_INT8, gamma=3), max_new_tokens=16)
    assert tuple(out.ids) == zoo.greedy_reference("qwen3", prompt)[:16]
    assert out.stats.num_accepted > 0.5 * out.stats.num_drafted
    assert len(made) > 2 * zoo.NUM_LAYERS


def test_where_there_is_no_gpu_it_says_what_is_missing() -> None:
    refusal = products.int8_refusal(torch.device("cuda"))
    assert refusal is not None
    assert refusal.startswith("Triton and its compiler, got ")
    assert products.int8_refusal(torch.device("mps")) == "a CPU or a CUDA device, got mps"
