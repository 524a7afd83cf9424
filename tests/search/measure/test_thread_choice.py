"""CPU threads: measured where nobody said how many, kept as they are where somebody did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from layerskip.analysis import step_times
from search.measure.threads import NUM_STEPS, choose_threads, halves
from tests.layerskip import zoo


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four of them, and an environment that says nothing."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Timed:
    """A `StepTimer` whose steps take what `seconds` says of torch's number of threads."""

    seconds: dict[int, float]

    def __init__(self, _model: Any, _gamma_max: int) -> None:
        self.asked: list[tuple[int, ...]] = []

    def verify_s(self, _text: Sequence[int], counts: Sequence[int]) -> list[float]:
        return [self.seconds[torch.get_num_threads()] * n for n in counts]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({4: 1.0, 2: 2.0, 1: 3.0}, 4),
        ({4: 9.0, 2: 2.0, 1: 3.0}, 2),
        ({4: 9.0, 2: 2.0, 1: 1.0}, 1),
        ({4: 1.00, 2: 1.04, 1: 1.5}, 2),  # a tie goes to the fewer
        ({4: 1.00, 2: 1.06, 1: 1.5}, 4),
    ],
)
def test_the_fastest_number_is_taken(seconds: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "StepTimer", Timed)
    monkeypatch.setattr(Timed, "seconds", seconds, raising=False)
    choice = choose_threads(zoo.layerskip_of("llama"))
    assert choice.num_threads == torch.get_num_threads() == chosen
    per_mix = NUM_STEPS + NUM_STEPS + 1
    assert choice.ms_by_threads == {n: pytest.approx(1000 * per_mix * s) for n, s in seconds.items()}
    assert f"{1000 * per_mix * seconds[2]:.1f} ms with 2" in str(choice)


def test_nothing_is_measured_where_the_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.layerskip_of("llama")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        with monkeypatch.context() as context:
            context.setenv(name, "4")
            assert choose_threads(model) is None
    torch.set_num_threads(1)
    assert choose_threads(model) is None
    assert torch.get_num_threads() == 1


def test_an_error_while_timing_leaves_the_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "StepTimer", Timed)
    monkeypatch.setattr(Timed, "seconds", {4: 1.0}, raising=False)
    with pytest.raises(KeyError):
        choose_threads(zoo.layerskip_of("llama"))
    assert torch.get_num_threads() == 4


def test_a_slow_model_is_timed_once_per_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def verify_s(_self: Timed, _text: Sequence[int], counts: Sequence[int]) -> list[float]:
        passes.append(torch.get_num_threads())
        return [1.0 for _ in counts]

    monkeypatch.setattr(step_times, "StepTimer", Timed)
    monkeypatch.setattr(Timed, "verify_s", verify_s)
    ticks = iter(range(0, 1_000, 60))
    choice = choose_threads(zoo.layerskip_of("llama"), clock=lambda: float(next(ticks)))
    assert passes == [4, 2, 1, 4, 2, 1]  # awake, and one pass
    assert choice.num_threads == 1


@pytest.mark.slow
def test_a_real_model_is_timed() -> None:
    choice = choose_threads(zoo.layerskip_of("llama"))
    assert list(choice.ms_by_threads) == halves(4) == [4, 2, 1]
    assert all(ms > 0 for ms in choice.ms_by_threads.values())
    assert torch.get_num_threads() == choice.num_threads


def test_halves_end_at_one() -> None:
    assert halves(1) == [1]
    assert halves(6) == [6, 3, 1]
