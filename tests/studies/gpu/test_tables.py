"""The page of the GPU study: its tables by hand, what failed, and files that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from studies.gpu import summarise, tables
from studies.gpu.book import read
from tests.studies.gpu.fakes import Mishaps, run


def test_the_rounds_table_by_hand() -> None:
    rows = [
        {"kept": 1.0, "int8": False, "gamma": 0, "ms": 2.0},
        {"kept": 1.0, "int8": True, "gamma": 4, "ms": 5.0},
        {"kept": 0.25, "int8": False, "gamma": 1, "ms": 3.0},
        {"kept": 0.25, "int8": False, "gamma": 4, "ms": 4.0},
        {"kept": 0.5, "int8": False, "gamma": 1, "ms": None},
    ]
    text = tables.rounds(rows, {})
    assert "A plain token takes 2.000 ms" in text
    assert "| 25.0 % | 3.000 | 4.000 |" in text
    assert "| 100.0 %, 8 bits |" in text
    # At .6: 1.6 tokens in 3 ms, or 2.3056 in 4; at .9: 1.9, or 4.0951.
    assert "| 25.0 % | 1.15x (gamma 4) |" in text
    assert "2.05x (gamma 4)" in text
    assert tables.expected_tokens(0.5, 2) == pytest.approx(1.75)


def test_a_tie_and_a_difference_are_told_apart_with_what_rounding_explains() -> None:
    several = {"num_rows": 5, "other_token": 1, "positions": 64, "largest_logit": 20.0}
    several["logit_spread"] = {"median": 0.0, "p99": 0.125, "largest": 0.25}
    same = {"skip_mask": "4:3", "gamma": 2, "identical": True, "is_tie": False, "first_difference": None}
    tie = same | {"identical": False, "is_tie": True, "first_difference": 7, "logit_gap": 0.125, "tolerance": 0.5}
    text = tables.ties([several, same, tie, tie | {"is_tie": False, "logit_gap": 2.0}], {})
    assert "| 5 | 1 of 64 | 0.000 | 0.125 | 0.250 | 20.0 |" in text
    assert "3 speculative outputs: 1 identical to plain decoding, 1 part at a tie." in text
    assert "- tie: 4:3 gamma 2 from token 7: 0.125 below the best logit, 0.500 are rounding" in text
    assert "- DIFFERING: 4:3 gamma 2 from token 7: 2.000 below the best logit" in text


def test_a_page_tells_what_failed_and_which_file_is_broken(tmp_path: Path) -> None:
    run(Mishaps(("raises",)), tmp_path / "a-tiny.json")
    record = read(tmp_path / "a-tiny.json")
    record["workers"][0] |= {"device": "d", "versions": {"torch": "2"}, "commit": "c", "started_at": "now"}
    record["steps"] = {"contexts": {**record["steps"]["raises"], "rows": [{"context": 8, "ms_per_token": 1.5}]}}
    (tmp_path / "a-tiny.json").write_text(json.dumps(record))
    page = summarise.page(tmp_path)
    assert "### Long texts\n\n**failed**: ValueError: the reason\n\n| tokens before | ms a token |" in page
    record["steps"]["contexts"]["rows"] = [{"context": 8}]
    (tmp_path / "a-tiny.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"a-tiny\.json: contexts: not what its step writes \(KeyError"):
        summarise.page(tmp_path)


def test_outcomes_of_tests_are_counted_and_what_did_not_pass_is_named() -> None:
    def of(outcome: str, reason: str = "", **properties: float) -> dict[str, Any]:
        row = {"outcome": outcome, "reason": reason, "properties": properties}
        return {"state": "done", "error": None, "rows": [row]}

    crashed = {"state": "failed", "error": "its process ended with exit code -11", "rows": []}
    text = summarise.tests(
        {
            "t.py::one": of("passed", capture_s=0.25),
            "t.py::two": of("failed", "line\nassert 1 == 2"),
            "t.py::three": of("skipped", "no device"),
            "t.py::four": crashed,
        }
    )
    assert text.splitlines() == [
        "1 passed, 1 failed, 1 skipped, 1 not finished.",
        "- failed: `two`: assert 1 == 2",
        "- skipped: `three`: no device",
        "- not finished: `four`: its process ended with exit code -11",
        "- `one`: capture_s 0.25",
    ]
