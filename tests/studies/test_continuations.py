"""How many continuations of a prompt a choice needs: the sums behind the table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from studies.continuations import main, regrets


def test_regret_is_what_the_choice_is_worth_less_than_the_best() -> None:
    """Two lookups; the worse one looks better on the first of two prompts."""
    tuning = np.array([[[0.3, 0.0]], [[0.1, 0.4]]])
    held_out = np.array([[[0.1]], [[0.2]]])
    rng = np.random.default_rng(0)
    assert regrets(tuning, held_out, 2, 1, rng) == {"mean": 0.0, "low": 0.0, "high": 0.0}
    found = regrets(tuning, held_out, 1, 1, rng)
    assert found["low"] == 0.0
    assert found["high"] == pytest.approx(1 - np.exp(-0.1))
    assert found["mean"] == pytest.approx(1 - np.exp(-0.05), rel=0.2)


def test_more_continuations_choose_better() -> None:
    rng = np.random.default_rng(1)
    worth = np.linspace(0.0, 0.1, 20)[:, None, None]
    tuning, held_out = (worth + rng.normal(0.0, 0.2, (20, 8, 6)) for _ in range(2))
    held_out = np.broadcast_to(worth, held_out.shape)
    once, often = (regrets(tuning, held_out, 6, count, rng)["mean"] for count in (1, 8))
    assert 0.0 < often < 0.6 * once


@pytest.mark.slow
def test_the_command_on_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--prompts", "4", "--continuations", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["num_prompts"], row["num_continuations"]) for row in rows] == [
        (prompts, count) for prompts in (1, 2, 4) for count in (1, 2)
    ]
    assert all(0.0 <= row["low"] <= row["high"] < 1.0 for row in rows)
    assert all(row["low"] - 1e-9 <= row["mean"] <= row["high"] + 1e-9 for row in rows)
    assert "  4 prompts x 2: " in capsys.readouterr().out
