"""The script that shows what measuring in lockstep gains: its arithmetic and its bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies.lockstep_noise import main, spread


def test_spread_is_within_prompts() -> None:
    """Prompts that differ from each other add nothing; repeats of one that differ by 0.2 do."""
    logs = np.array([[0.0, 5.0], [0.2, 5.2]])
    value, low, high = spread(logs)
    assert value == pytest.approx(math.sqrt((2 * 0.1**2 + 2 * 0.1**2) / 2))
    assert low < value < high


@pytest.mark.parametrize("flag", ["--prompts", "--repeats"])
def test_too_few_to_have_a_spread(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, "1"]) == 2
    assert f"{flag}: must be at least 2" in capsys.readouterr().err
