"""What proposing costs: the command on a small model, its table and its bad input."""

from __future__ import annotations

from typing import Any

import pytest

from studies.proposals import main, table


def row(number: int, origin: str, seconds: float) -> dict[str, object]:
    return {"number": number, "proposal_s": seconds, "user_attrs": {"origin": origin}}


def test_the_first_trial_of_a_run_pays_for_what_came_before_it() -> None:
    trials = [row(0, "pool", 30.0), row(1, "repeat of #0", 0.01), row(2, "pool", 0.3), row(0, "pool", 32.0)]
    trials += [row(20, "pool", 2.5)]
    lines = [line.split() for line in table(trials)]
    assert lines[0] == ["seconds", "of", "trials", "mean", "median", "95th", "most"]
    assert lines[1] == ["first", "2", "31.000", "31.000", "31.900", "32.000"]
    assert lines[2][:4] == ["costs", "again", "1", "2.500"]
    assert lines[3] == ["all", "others", "2", "0.155", "0.155", "0.285", "0.300"]
    assert lines[4:] == [["repeat", "1", "0.010", "0.010", "0.010", "0.010"], ["pool", "1", *["0.300"] * 4]]


@pytest.mark.slow
def test_a_small_model_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layers", "3", "--trials", "3", "--max-new-tokens", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 layers of 64, 6 bits, one thread"
    assert lines[2].startswith("first               2")
    assert lines[3].startswith("all others          4")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layers", "1"], "--layers: must be at least 2, got 1"),
        (["--trials", "1"], "--trials: must be at least 2, got 1"),
        (["--seeds", "1"], "--seeds: must be at least 2, got 1"),
        (["--hidden-size", "100"], "--hidden-size: must be a multiple of 64, got 100"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], said: str, refused: Any) -> None:
    assert said in refused(main, flags)
