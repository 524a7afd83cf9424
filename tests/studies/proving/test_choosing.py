"""What ending the choice early costs: on races whose outcome is known, and on the candidates that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from search.confirm.passes import RACE_FROM
from studies.proving.choosing import committed_candidates, main, outcomes, race

STUDIES = Path(__file__).parents[3] / "studies"


def test_a_race_to_the_end_takes_the_best_and_one_that_may_miss_much_takes_no_more_prompts_than_it_must() -> None:
    rng = np.random.default_rng(0)
    ratios = np.exp(np.array([0.50, 0.51, 0.1])[:, None] + rng.normal(0.0, 0.02, (3, 24)))
    assert race(ratios, None) == (1, RACE_FROM * 4 + (24 - RACE_FROM) * 3)
    chosen, num_decodings = race(ratios, 0.05)
    assert chosen in (0, 1)
    assert num_decodings == RACE_FROM * 4


def test_what_is_lost_is_seen_on_prompts_that_did_not_choose() -> None:
    """Alike on the whole and unlike by prompt: who stops early loses as much as it may, at most."""
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(0.0, 0.1, (4, 30)))
    by_rule = {one.settled_at: one for one in outcomes("made up", ratios, orders=50)}
    assert by_rule[None].lost == 0.0
    decodings = [by_rule[at].num_decodings for at in (None, 0.0025, 0.005, 0.01, 0.02)]
    assert decodings == sorted(decodings, reverse=True)


def test_the_committed_studies_have_candidates_to_choose_among(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = committed_candidates(STUDIES)
    # Of studies that settled, whose choice ended early, there is nothing to go over again.
    assert {"demo", "demo/t0.7", "mtp"} <= set(found)
    assert "smollm2/bfloat16" not in found
    assert all(len(ratios) > 1 for ratios in found.values())
    assert main(["--orders", "1", "--out", str(tmp_path / "choosing.json")]) == 0
    races = json.loads((tmp_path / "choosing.json").read_text(encoding="utf-8"))["races"]
    assert {one["study"] for one in races} == set(found)
    assert "to the end" in capsys.readouterr().out
