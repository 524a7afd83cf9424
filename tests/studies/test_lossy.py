"""The study of lossy rules: its command on the demo, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip.config.lossy_acceptance import LADDER
from studies.lossy import WAYS, main


@pytest.mark.slow
def test_the_command_on_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lossy.json"
    assert main(["--prompts", "2", "--tokens", "8", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert list(record["regimes"]) == ["greedy, 8 tokens", "t0.7, 8 tokens"] == list(record["machine"])
    for ways in record["regimes"].values():
        assert tuple(ways) == WAYS
        for way in ways.values():
            assert "lossy" not in way["config"]
            assert [one["rule"] for one in way["rungs"]] == [rule.name for rule in LADDER]
    careful = record["regimes"]["greedy, 8 tokens"]["exported"]["rungs"][0]["confirmed"]
    # A token with more than half of the probability is the greedy choice.
    assert careful["num_identical"] == careful["num_prompts"] == 2
    assert careful["distance"]["unlike_share"] == 0.0
    assert capsys.readouterr().out.count("LOSSY") == 4


def test_a_regime_that_it_does_not_know_is_refused(refused: Any) -> None:
    assert "error: --regimes: must be of greedy, t0.7, got t2" in refused(main, ["--regimes", "greedy,t2"])
