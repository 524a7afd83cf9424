"""The record of a comparison: small, whole, and enough to make every result again, to the last digit."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search.compact import read_lines, write_lines
from search.compare import main
from search.comparison.confirm import pick_key
from search.comparison.record import FILE, RESULTS, read_record, write_results
from search.comparison.runs import trials_of
from search.study.space import SearchSpace
from tests.search.comparison.test_compare import Comparison, bench, plan_of, stand_in

__all__ = ["bench", "stand_in"]  # fixtures


def texts(folder: Path) -> list[str]:
    return [(folder / name).read_text(encoding="utf-8") for name in RESULTS]


def remove_journals(out: Path) -> None:
    for journal in out.glob("*.jsonl"):
        journal.unlink()


def test_the_record_alone_makes_every_result_again(bench: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where an output was not lossless."""
    bench.decoder.wrong_on = lambda config: config.skip_mask.exit_layer == 5
    assert bench.run(plan_of(trials=7, checkpoints=(2, 7))) == 1
    before = texts(bench.out)
    assert json.loads(before[0])["violations"]
    remove_journals(bench.out)
    for name in RESULTS:
        (bench.out / name).unlink()
    assert main(["--tables", "--out", str(bench.out)]) == 0
    after = texts(bench.out)
    assert after[:2] == before[:2]
    assert len(after[2]) == pytest.approx(len(before[2]), abs=100), "but for the plot's random names"
    assert capsys.readouterr().out == before[1]


def test_a_record_leaves_out_what_no_result_is_made_of(bench: Comparison) -> None:
    """Trials beyond the plan's, picks of earlier checkpoints, and most of what a trial says of itself."""
    bench.run(plan_of(trials=7, checkpoints=(7,)))
    num_lines = len(read_lines(bench.out / FILE))
    bench.run(plan_of(trials=3, checkpoints=(3,), confirm_repeats=1))
    lines = read_lines(bench.out / FILE)
    trials = [one for one in lines[1:] if "pick" not in one]
    measurements = [one for one in lines if "pick" in one]
    assert len(lines) < num_lines
    assert len(trials) == 6 * 3
    assert {one["repeat"] for one in measurements} == {0}
    assert {one["pick"] for one in measurements} == set(bench.results()["picks"])
    assert all("value" not in one and "process" not in one["user_attrs"] for one in trials)


def test_a_record_from_before_share_prefix_went_makes_its_results(bench: Comparison, tmp_path: Path) -> None:
    """To the last digit; only picks are still called by all that their trials had."""
    bench.run()
    now = bench.results()
    header, *lines = read_lines(bench.out / FILE)
    header["space"]["share_prefix"] = True
    known = {one["pick"] for one in lines if "pick" in one} - {now["ngrams"]["pick"]}
    calls = {key: pick_key(json.loads(key) | {"share_prefix": len(key) % 2 == 0}) for key in known}
    for one in lines:
        if "pick" in one:
            one["pick"] = calls.get(one["pick"], one["pick"])
        else:
            one["params"]["share_prefix"] = len(pick_key(one["params"])) % 2 == 0
    assert len(known) > 1
    file = tmp_path / FILE
    write_lines(file, [header, *lines])
    write_results(read_record(file), tmp_path)
    told = (tmp_path / "results.json").read_text()
    for key, called in calls.items():
        told = told.replace(json.dumps(called), json.dumps(key))
    assert json.loads(told) == now


def test_a_comparison_is_not_continued_from_its_record(bench: Comparison) -> None:
    bench.run()
    remove_journals(bench.out)
    decoded = bench.decoder.num_decoded
    with pytest.raises(ValueError, match=r"record of a finished comparison without its journals.*--out.*--tables"):
        bench.run()
    assert bench.decoder.num_decoded == decoded


def test_tables_of_what_has_no_record_are_refused(tmp_path: Path, refused: Any) -> None:
    assert f"{tmp_path / FILE}: no such file" in refused(main, ["--tables", "--out", str(tmp_path)])


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of a whole record."""
    bench = Comparison(tmp_path_factory.mktemp("whole") / "compare")
    assert bench.run(plan_of(strategies=("random", "layerskip"), trials=3, checkpoints=(3,))) == 0
    return read_lines(bench.out / FILE)


def _without_header(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[1:]


def _without_a_trial(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = max(i for i, one in enumerate(lines) if "number" in one)
    return lines[:last] + lines[last + 1 :]


def _without_a_measurement(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return lines[:-1]


def _without_the_ngrams(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in lines if "prompt_lookup" not in one.get("pick", "")]


def _with(place: int, **changes: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one | changes if i == place % len(lines) else one for i, one in enumerate(lines)]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_header, "line 1: facts: is required"),
        (_with(0, facts={}), "line 1: facts.reference: must have noise_sigma and num_per_trial"),
        (_with(0, ngrams={"skip_mask": "6:none", "gamma": -1}), "line 1: ngrams: gamma"),
        (_with(0, prompt_ids=["other"]), "not a whole record"),
        (_with(1, state="GOOD"), "line 2 is not a trial: state"),
        (_with(1, params={"gamma": 99}), "line 2 does not fit the search space"),
        (_with(2, number=3), "line 3: number: expected trial 1, got 3"),
        (_without_a_trial, "not a whole record"),
        (_without_a_measurement, "not a whole record"),
        (_without_the_ngrams, "not a whole record"),
        (_with(-1, is_tie=None), r"line \d+: is_tie: must be of type bool"),
    ],
)
def test_what_is_no_record_is_refused_by_line(
    lines: list[dict[str, Any]],
    tmp_path: Path,
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    message: str,
) -> None:
    file = tmp_path / FILE
    write_lines(file, change(lines))
    with pytest.raises(ValueError, match=rf"record\.jsonl\.xz: {message}"):
        read_record(file)


@pytest.mark.parametrize(("params", "fits"), [({"draft_vocab": 512}, True), ({"draft_vocab": True}, False)])
def test_trials_may_have_what_is_chosen_from_a_list(params: dict[str, Any], fits: bool) -> None:
    space = SearchSpace(2, 4, (0, 1), (0, 1), (), draft_vocabs=(1024, 512))
    line = {"strategy": "ours", "seed": 0, "number": 0, "state": "COMPLETE", "value": 1.0, "params": params}
    line |= {"user_attrs": {}, "steps": [], "proposal_s": 0.0, "measure_s": 0.0, "seconds": 0.0}
    if fits:
        assert trials_of([(1, line)], Path("trials.jsonl"), space)["ours", 0][0].params == params
        return
    with pytest.raises(ValueError, match="does not fit the search space: params"):
        trials_of([(1, line)], Path("trials.jsonl"), space)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not xz", "not a whole xz file"),
        (lzma.compress(b'{"a": 1}\n')[:-5], "not a whole xz file"),
        (lzma.compress(b'{"a": 1}\n[1]\n'), "line 2 is not a JSON object"),
        (lzma.compress(b"\xff\n"), "line 1 is not a JSON object"),
        (lzma.compress(bytes(1001)), "must be at most 1000 bytes"),
    ],
    ids=["not xz", "cut off", "a list", "not text", "a bomb"],
)
def test_a_compact_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    monkeypatch.setattr("search.compact.MAX_BYTES", 1000)
    file = tmp_path / "lines.jsonl.xz"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"lines\.jsonl\.xz: {message}") as raised:
        read_lines(file)
    assert "\n" not in str(raised.value)


def test_the_committed_tables_are_what_the_committed_record_says(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "studies" / "comparison" / "demo"
    write_results(read_record(folder / FILE), tmp_path)
    made, kept = ((at / "results.json").read_text(encoding="utf-8") for at in (tmp_path, folder))
    kept = kept.replace(', share_prefix"', '"')  # gone since from the words for a config
    assert NUMBER.sub("", made) == NUMBER.sub("", kept)
    # Other versions of NumPy sum in another order.
    assert _numbers(made) == pytest.approx(_numbers(kept), rel=1e-9, abs=1e-12)
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == (folder / "table.md").read_text(encoding="utf-8")


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def _numbers(text: str) -> list[float]:
    return [float(one) for one in NUMBER.findall(text)]
