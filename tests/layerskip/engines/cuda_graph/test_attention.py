"""Attention kernels: cuDNN's never over growing keys; in recorded steps the fastest whose numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from layerskip.analysis.teacher_forcing.layerwise import LayerwiseForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.engines import EagerEngine, check_agreement
from layerskip.engines.cuda_graph.attention import AttentionChoice, AttentionShape
from layerskip.engines.cuda_graph.attention_kernels import _efficient_part, attend, split_keys
from layerskip.engines.cuda_graph.engine import CudaGraphEngine, GraphOptions
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.cuda_graph.static_step import additive_mask
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import RerunRecorder
from layerskip.huggingface import growing_keys
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.growing_keys import WITHOUT_CUDNN, over_growing_keys
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, graph_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, frozenset({None, 300}), torch.float32, CPU)


def test_over_growing_keys_cudnn_is_off_on_cuda_alone_and_back_as_it_was_after() -> None:
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    assert allowed()
    with over_growing_keys([CPU]):
        assert allowed()
    inside = []
    with suppress(RuntimeError), over_growing_keys([CPU, CUDA]):
        inside.append(allowed())
        raise RuntimeError("in a forward")
    assert inside == [False]
    assert allowed()
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    try:
        with over_growing_keys([CUDA]):
            assert not allowed()
        assert not allowed()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled=True)


@pytest.fixture
def allowed_in_attention(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """On what passes for a CUDA device: whether cuDNN was allowed, for every call of attention."""
    seen: list[bool] = []
    original = F.scaled_dot_product_attention

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(growing_keys, "_any", lambda _devices, _kind: True)
    return seen


def test_forwards_over_growing_keys_run_without_cudnn(allowed_in_attention: list[bool]) -> None:
    ids = torch.tensor(zoo.prompt_of(5))
    adapter = ModelAdapter(zoo.build("llama"))
    engines = [EagerEngine(adapter), FusedEngine(adapter), engine_of(graph_model("llama", modules=True))]
    for engine in engines:
        allowed_in_attention.clear()
        with engine.session(8):
            engine.forward(ids)
            engine.forward(ids[:1])
        assert len(allowed_in_attention) >= 2 * zoo.NUM_LAYERS, engine.name
        assert not any(allowed_in_attention), engine.name
        assert engine.attention_backend == WITHOUT_CUDNN


def test_so_does_teacher_forcing(allowed_in_attention: list[bool]) -> None:
    forcing = LayerwiseForcing(FusedEngine(ModelAdapter(zoo.build("llama"))), [ForcedText([1, 2, 3], [4, 5])])
    allowed_in_attention.clear()
    forcing.target(zoo.NUM_LAYERS)
    assert allowed_in_attention
    assert not any(allowed_in_attention)


def plain_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> Sequence[torch.Tensor]:
    """What the CUDA kernel gives `split_keys`, its sums padded to 32 rows as there."""
    scores = (queries @ keys.transpose(-1, -2) * scale + mask).float()
    sums = F.pad(scores.logsumexp(dim=-1), (0, 32 - queries.shape[2]), value=float("nan"))
    return scores.softmax(dim=-1).to(values.dtype) @ values, sums


def samples(num_rows: int, num_visible: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    queries = torch.randn((1, 3, num_rows, 16), generator=generator, dtype=dtype)
    buffers = torch.randn((2, 1, 3, num_visible + 96, 16), generator=generator, dtype=dtype)
    return queries, buffers[0][:, :, :num_visible], buffers[1][:, :, :num_visible]


@pytest.mark.parametrize("num_visible", [512, 768, 2048])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_keys_is_attention(num_visible: int, window: int | None, dtype: torch.dtype) -> None:
    """Early in the buffers and late, so that chunks are hidden from end to end on either side."""
    for last in (3, 255, 256, 300, num_visible - 1):
        queries, keys, values = samples(4, num_visible, dtype)
        mask = additive_mask(torch.arange(last - 3, last + 1), num_visible, window, dtype)
        got = split_keys(queries, keys, values, mask, 0.2, plain_part)
        exact = attend(queries.float(), keys.float(), values.float(), mask.float(), 0.2)
        rounding = 1e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(got.float(), exact, rtol=rounding, atol=rounding)
        assert got.dtype == dtype


def test_split_keys_refuses_what_does_not_split() -> None:
    for num_visible in (256, 300):
        queries, keys, values = samples(1, num_visible, torch.float32)
        mask = torch.zeros(1, num_visible)
        with pytest.raises(ValueError, match=f"two or more times 256, got {num_visible}"):
            split_keys(queries, keys, values, mask, 0.2, plain_part)


def test_the_kernel_that_split_keys_calls_on_a_gpu_takes_these_arguments() -> None:
    """Shapes alone, on the meta device: the operation is not one of torch's documented functions."""
    queries, keys, values = (torch.empty(1, 3, n, 64, device="meta", dtype=torch.bfloat16) for n in (5, 1024, 1024))
    mask = torch.empty(5, 1024, device="meta", dtype=torch.bfloat16)
    assert split_keys(queries, keys, values, mask, 0.2, _efficient_part).shape == queries.shape


def wrong_mask(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, scale: float) -> Any:
    return attend(queries, keys, values, torch.zeros_like(mask), scale)


def refuses(*_: Any) -> torch.Tensor:
    raise RuntimeError("No execution plans support the graph")


def not_a_number(*arguments: Any) -> torch.Tensor:
    return attend(*arguments) * float("nan")


class Clock:
    """Takes the times of kernels from a table, in the order in which they come."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, works: Sequence[Callable[[], None]]) -> list[float]:
        for work in works:
            work()
        return [self.seconds.pop(0) for _ in works]


def test_the_fastest_over_one_token_and_several_is_taken_for_each_number_of_positions() -> None:
    first, second = (partial(attend) for _ in range(2))
    clock = Clock(
        1.0, 9.0, 4.0, 5.0, 3.0, 3.0, 1.0, 6.0
    )  # each kernel's one token and several, over 256, then over 512
    choice = AttentionChoice({"first": first, "second": second}, clock)
    assert choice.description == "first or second"
    choice.measure(SHAPE, 512)
    assert [choice.kernel(n) for n in (16, 256, 257, 512, 4096)] == [second, second, first, first, first]
    assert choice.description == "second, first from 512 positions"
    assert choice.times["second", 5, 256] == 5.0 / 20
    choice.measure(SHAPE, 512)  # known by now: the clock has no times left
    assert clock.seconds == []


def test_wrong_numbers_and_refusals_leave_a_kernel_out() -> None:
    kernels = {"wrong": wrong_mask, "refuses": refuses, "nan": not_a_number, "right": attend}
    choice = AttentionChoice(kernels, Clock(7.0, 7.0))
    choice.measure(SHAPE, 256)
    assert choice.description == "right"
    assert set(choice.times) == {("right", 1, 256), ("right", 5, 256)}
    with pytest.raises(RuntimeError, match="no kernel serves steps over 256 positions"):
        AttentionChoice({"wrong": wrong_mask, "refuses": refuses}, Clock()).measure(SHAPE, 256)


def test_a_single_kernel_is_not_measured_and_several_must_be() -> None:
    choice = AttentionChoice.on(CPU)
    choice.measure(SHAPE, 1 << 30)
    assert choice.kernel(256) is attend
    assert choice.description == "torch's choice"
    with pytest.raises(RuntimeError, match="measure before the first step"):
        AttentionChoice({"one": attend, "other": attend}, Clock()).kernel(256)
    with pytest.raises(ValueError, match="kernels: must hold at least one"):
        AttentionChoice({}, Clock())


@pytest.mark.parametrize("name", ["qwen2-sliding", "llama"])
def test_steps_run_on_the_kernel_chosen(name: str) -> None:
    adapter = ModelAdapter(zoo.build(name))
    used: list[int] = []

    def split(*arguments: Any) -> torch.Tensor:
        used.append(arguments[1].shape[2])
        return split_keys(*arguments, plain_part)

    choice = AttentionChoice({"torch": attend, "split keys": split}, Clock(1.0, 1.0, 2.0, 2.0, 1.0, 1.0))
    executor = LeanExecutor(FusedEngine(adapter), attention=choice)
    engine = CudaGraphEngine(adapter, executor, RerunRecorder(), GraphOptions(granule=512, min_visible=512))
    with engine.session(512):
        pass
    used.clear()
    check_agreement(engine, EagerEngine(adapter), adapter)
    assert set(used) == {512}
    assert engine.attention_backend == "torch, split keys from 512 positions"
