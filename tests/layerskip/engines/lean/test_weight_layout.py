"""The forms of weights: measured once a shape, the same numbers in each, no copy where the model's own serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.engines import EagerEngine, check_agreement
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean import weight_layout as module
from layerskip.engines.lean.linear import DenseLinear, PackedLinear, rows_of_product
from layerskip.engines.lean.weight_layout import TorchLayers
from layerskip.engines.recording.stopwatch import Stopwatch
from layerskip.huggingface.adapter import ModelAdapter
from tests.layerskip import zoo

CPU = torch.device("cpu")
# Seconds of products with one row and with a few, by inputs, by outputs, packed, packed and padded.
BY_INPUTS = [1.0, 2.0, 1.5, 3.0, 1.5, 1.9, 1.4, 1.9]
BY_OUTPUTS = [1.0, 2.0, 0.7, 1.5, 1.5, 1.9, 1.4, 1.9]
ABOUT_THE_SAME = [1.0, 2.0, 0.95, 1.9, 0.95, 1.9, 0.95, 1.9]
PACKED = [1.0, 2.0, 1.5, 3.0, 1.0, 0.9, 1.0, 0.9]
PADDED = [1.0, 2.0, 1.5, 3.0, 1.4, 0.9, 1.0, 0.9]
BOTH = [1.0, 2.0, 1.5, 3.0, 1.6, 0.9, 1.4, 0.9]
LAYOUTS = {
    "": BY_INPUTS,
    "weights by outputs": BY_OUTPUTS,
    "weights packed": PACKED,
    "weights packed and padded": PADDED,
    "weights packed, one row by inputs": BOTH,
}


class Clock:
    """Gives one row of times for each measurement."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = list(rows)

    def __call__(self, works: Sequence[Callable[[], None]]) -> list[float]:
        for work in works:
            work()
        return self.rows.pop(0)[: len(works)]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_BYTES", 0)


@pytest.mark.usefixtures("any_size")
def test_each_shape_is_measured_once_and_kept_in_its_fastest_form() -> None:
    layers = TorchLayers(CPU, Clock(BY_INPUTS, BY_OUTPUTS, ABOUT_THE_SAME, PADDED))
    kinds: dict[tuple[int, int], type] = {(6, 4): DenseLinear, (8, 4): DenseLinear, (4, 6): DenseLinear}
    kinds[(9, 6)] = PackedLinear
    for _ in range(3):
        for shape, kind in kinds.items():
            weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(3, shape[1])
            linear = layers.linear([weight], bias)
            assert type(linear) is kind
            assert linear.num_outputs == shape[0]
            torch.testing.assert_close(linear(x), x @ weight.t() + bias)
            if isinstance(linear, DenseLinear):
                assert linear.weight.is_contiguous() == (shape != (8, 4))
    assert layers.description == "weights by inputs; those of 8×4 by outputs; those of 9×6 packed and padded"


def test_a_number_format_that_cannot_be_packed_is_not() -> None:
    assert PackedLinear.serves(torch.ones(2, 2))
    in_bfloat16 = PackedLinear.serves(torch.ones(2, 2, dtype=torch.bfloat16))
    assert in_bfloat16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert not PackedLinear.serves(torch.ones(2, 2, dtype=torch.float64))
    assert not PackedLinear.serves(torch.ones(2, 2, device="meta"))


@pytest.mark.slow
def test_bfloat16_on_a_cpu_without_avx512_is_not_packed() -> None:
    """It was, and loading the model ended in oneDNN's RuntimeError."""
    code = "import torch; from layerskip.engines.lean.linear import PackedLinear as P; w = torch.ones(64, 64); "
    code += "print(P.serves(w), P.serves(w.bfloat16()))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["True", "False"]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
@pytest.mark.parametrize("description", LAYOUTS)
def test_the_numbers_are_the_models_in_every_form(
    monkeypatch: pytest.MonkeyPatch, overrides: dict[str, bool], description: str
) -> None:
    adapter = ModelAdapter(zoo.build("llama", **overrides))
    monkeypatch.setattr(module, "Stopwatch", lambda _device: Clock(*[LAYOUTS[description]] * 9))
    fused = FusedEngine(adapter)
    assert fused.maker.description == description
    check_agreement(fused, EagerEngine(adapter), adapter)
    ids = torch.tensor(zoo.prompt_of(6))
    with fused.session(12):
        whole = fused.forward(ids)
    with fused.session(12):
        narrow = fused.forward(ids, SkipMask.none(zoo.NUM_LAYERS).narrowed(20))
    torch.testing.assert_close(narrow[:, :20], whole[:, :20], rtol=1e-4, atol=1e-4)
    assert bool((narrow[:, 20:] == -torch.inf).all())


@pytest.mark.usefixtures("any_size")
def test_a_head_that_only_trained_weights_draft_with_is_packed_before_the_clock_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Stopwatch", lambda _device: Clock(*[PACKED] * 20))
    model, prompt = LayerSkipModel(zoo.model_of("llama"), engine="fused"), zoo.prompt_of(6)
    weights = zoo.eagle_of("llama").narrowed(20)
    config = DecodeConfig(drafter="eagle", skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=3, draft_weights=weights)
    out = model.generate(prompt, max_new_tokens=8, config=config)
    assert out.ids == list(zoo.greedy_reference("llama", prompt)[:8])
    assert out.stats.num_drafted


def test_small_matrices_are_not_measured() -> None:
    layers = TorchLayers(CPU, Clock())
    assert type(layers.linear([torch.randn(64, 32)], None)) is DenseLinear
    assert layers.description == ""


def test_the_stopwatch_takes_the_shortest_of_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    ticks = iter([0.0, 9.0, 0.0, 9.0, *(t for long in (5.0, 2.0, 3.0, 2.5, 4.0, 6.0, 7.0) for t in (0, long, 0, 1.5))])
    monkeypatch.setattr("layerskip.engines.recording.stopwatch.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr("layerskip.engines.recording.stopwatch._ENOUGH_S", 1e9)
    assert Stopwatch(CPU)([lambda: ran.append("a"), lambda: ran.append("b")]) == [2.0, 1.5]
    assert ran == ["a", "b"] * 8


def test_the_stopwatch_stops_early_over_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("layerskip.engines.recording.stopwatch._ENOUGH_S", 0.0)
    Stopwatch(CPU)([lambda: ran.append("a")])
    assert len(ran) == 3  # one untimed, two timed


def test_prompts_of_every_length_need_few_kernels() -> None:
    """As many rows as a round may have are left as they are; of a prompt little is added."""
    filled = {count: rows_of_product(count) for count in range(1, 8193)}
    assert all(filled[count] == count for count in range(1, 33))
    assert all(count <= one <= max(count + 15, count * 17 / 16) for count, one in filled.items())
    assert len(set(filled.values()) - set(range(1, 33))) < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_product_has_a_row_for_every_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn((24, 16), generator=generator).to(dtype), torch.randn(24, generator=generator).to(dtype)
    if not PackedLinear.serves(weight):
        pytest.skip(f"this CPU packs no {dtype}")
    packed, seen = PackedLinear(weight, bias, pads=True), set()
    product = torch.ops.mkldnn._linear_pointwise

    def watched(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.add(len(x))
        out: torch.Tensor = product(x, *arguments)
        return out

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    for num_rows in (1, 3, 4, 5, 32, 33, 48, 49, 300, 1000):
        x = torch.randn((num_rows, 16), generator=generator).to(dtype)
        out = packed(x)
        assert out.shape == (num_rows, 24)
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias), **close)
        torch.testing.assert_close(packed.add_to(x.new_ones(num_rows, 24), x), out + 1, **close)
    assert seen == {4, 5, 32, 48, 64, 304, 1024}
