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
        {"kept": 1.0, "gamma": 0, "ms": 2.0},
        {"kept": 0.25, "gamma": 1, "ms": 3.0},
        {"kept": 0.25, "gamma": 4, "ms": 4.0},
        {"kept": 0.5, "gamma": 1, "ms": None},
    ]
    text = tables.rounds(rows, {})
    assert "A plain token takes 2.000 ms" in text
    assert "| 25.0 % | 3.000 | 4.000 |" in text
    # At .6: 1.6 tokens in 3 ms, or 2.3056 in 4; at .9: 1.9, or 4.0951.
    assert "| 25.0 % | 1.15x (gamma 4) |" in text
    assert "2.05x (gamma 4)" in text
    assert tables.expected_tokens(0.5, 2) == pytest.approx(1.75)


def test_attention_kernels_are_told_by_visible_positions() -> None:
    rows = [
        {"kernel": kernel, "num_tokens": tokens, "num_visible": visible, "us": us}
        for kernel, tokens, visible, us in (("math", 1, 256, 9.0), ("math", 5, 256, 11.5), ("split keys", 1, 512, 4.0))
    ]
    text = tables.attention([*rows, {"taken": "split keys"}], {})
    assert "| kernel | 256 positions | 512 positions |" in text
    assert "| math | 9.0 / 11.5 | - / - |" in text
    assert "| split keys | - / - | 4.0 / - |" in text
    assert "Taken: split keys." in text


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


def test_bandwidth_is_held_against_a_large_copy() -> None:
    row = {"engine": "fused", "way": "plain", "reason": "asked for", "ms_per_token": 4.0}
    row |= {"step_bytes": 6_000_000_000, "end_to_end_tokens_per_s": 200.0, "load_s": 9.0, "added_bytes": 3 << 30}
    text = tables.plain([row], {"copy_bytes_per_s": 3e12})
    assert "| fused | plain | 4.000 | 250.0 | 200.0 | 6.000 | 50.0 % | 9.0 | 3.00 |" in text


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


def test_the_number_to_quote_stands_with_its_config_interval_and_end_to_end_value() -> None:
    numbers = {"speedup": 1.5, "speedup_ci_low": 1.25, "speedup_ci_high": 1.75}
    numbers |= {f"end_to_end_{name}": value - 0.125 for name, value in numbers.items()}
    numbers |= {"num_prompts": 16, "num_repeats": 2, "tokens_per_s": 300.0, "plain_tokens_per_s": 200.0}
    facts = {"num_identical": 15, "num_ties": 1, "repeated_ngram_share": 0.25, "machine": "load 1"}
    config = {"skip_mask": "4:2-3", "gamma": 3, "draft_threshold": 0.5}
    assert summarise.confirmed(numbers | facts, config) == (
        "- mask 4:2-3, gamma 3, draft_threshold 0.5: on 16 held-out prompts x 2 1.500x (1.250..1.750), prompt included "
        "1.375x (1.125..1.625); 300.0 against 200.0 tok/s; identical outputs 15, ties 1; repeated 4-grams 25.0 %. "
        "Machine: load 1."
    )
    assert summarise.confirmed(numbers | facts, {"skip_mask": "4:none", "gamma": 0}).startswith("- The best candidate:")


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
