"""The layout of weights: measured once a shape, the same numbers either way, no copy where the model's own serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from layerskip.engines import EagerEngine, check_agreement
from layerskip.engines import weight_layout as module
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.stopwatch import Stopwatch
from layerskip.engines.weight_layout import WeightLayouts
from layerskip.huggingface.adapter import ModelAdapter
from tests.layerskip import zoo

CPU = torch.device("cpu")
BY_INPUTS_IS_FASTER, BY_OUTPUTS_IS_FASTER = [1.0, 2.0, 1.5, 3.0], [1.0, 2.0, 0.7, 1.5]
ABOUT_THE_SAME = [1.0, 2.0, 0.95, 1.9]


class Clock:
    """Gives one row of times for each measurement: one row and a few by inputs, then both by outputs."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = list(rows)

    def __call__(self, works: Sequence[Callable[[], None]]) -> list[float]:
        for work in works:
            work()
        return self.rows.pop(0)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_BYTES", 0)


@pytest.mark.usefixtures("any_size")
def test_each_shape_is_measured_once_and_stored_in_its_faster_layout() -> None:
    layouts = WeightLayouts(CPU, Clock(BY_INPUTS_IS_FASTER, BY_OUTPUTS_IS_FASTER, ABOUT_THE_SAME))
    shapes = {(6, 4): True, (8, 4): False, (4, 6): True}  # is it a copy laid out by inputs?
    for _ in range(3):
        for shape, by_inputs in shapes.items():
            weight = torch.randn(shape)
            arranged = layouts.arrange(weight)
            assert torch.equal(arranged, weight.t())
            assert arranged.is_contiguous() == by_inputs
            assert (arranged.data_ptr() == weight.data_ptr()) == (not by_inputs)
    assert layouts.description == "weights by inputs, those of 8×4 by outputs"


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
def test_the_numbers_are_the_models_in_either_layout(
    monkeypatch: pytest.MonkeyPatch, overrides: dict[str, bool]
) -> None:
    adapter = ModelAdapter(zoo.build("llama", **overrides))
    for times, description in (
        (BY_INPUTS_IS_FASTER, "weights by inputs"),
        (BY_OUTPUTS_IS_FASTER, "weights by outputs"),
    ):
        monkeypatch.setattr(module, "Stopwatch", lambda _device, times=times: Clock(*[times] * 9))
        fused = FusedEngine(adapter)
        assert fused.layouts.description == description
        check_agreement(fused, EagerEngine(adapter), adapter)


@pytest.mark.usefixtures("any_size")
def test_by_outputs_a_single_matrix_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Stopwatch", lambda _device: Clock(*[BY_OUTPUTS_IS_FASTER] * 9))
    adapter = ModelAdapter(zoo.build("llama"))
    fused = FusedEngine(adapter)
    attention, mlp = fused.layers[1]
    own = {parameter.data_ptr() for parameter in adapter.model.parameters()}
    assert {one.weight.data_ptr() in own for one in (attention.out, mlp.down, fused.head)} == {True}
    assert {one.weight.data_ptr() in own for one in (attention.qkv, mlp.gate_up)} == {False}


def test_small_matrices_are_not_measured() -> None:
    layouts = WeightLayouts(CPU, Clock())
    assert layouts.arrange(torch.randn(64, 32)).is_contiguous()
    assert layouts.description == "weights by inputs"


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
