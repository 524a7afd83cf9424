"""The audit of losslessness: the same cases every time, a wrong token is found and can be run again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.decoding import loop as decode
from layerskip.rounds.verifier import Verdict
from studies.audit import run as audit
from studies.audit.cases import LEAN, LONGEST, MODULES, PAIRS, Case, draw_case
from studies.audit.record import Record
from studies.audit.subjects import Subjects
from tests.layerskip import zoo

COMMITTED = Path(audit.__file__).with_name("result.json")


def main(tmp_path: Path, *flags: str) -> int:
    return audit.main(["--out", str(tmp_path / "result.json"), *flags])


def stored(tmp_path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return data


def test_cases_reach_everything_and_follow_from_their_number() -> None:
    cases = [draw_case(0, number) for number in range(2_000)]
    assert cases[7] == draw_case(0, 7) != draw_case(1, 7)
    assert {(case.architecture, case.engine) for case in cases} == set(PAIRS)
    assert {case.engine for case in cases} == {"eager", "fused", LEAN, MODULES}
    assert {case.architecture for case in cases} == set(zoo.NAMES)
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}
    assert {case.budget for case in cases} == set(range(1, LONGEST + 1))
    assert {case.config.drafter for case in cases} == {"layer_skip", "prompt_lookup", "suffix", "hybrid"}
    for name in (
        *("draft_threshold", "target_threshold", "gamma", "eos"),
        *("lookup", "has_store"),
    ):
        some = Counter(bool(getattr(case, name)) for case in cases)
        assert min(some[True], some[False]) > 100, name
    assert all(Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case for case in cases[:50])


def test_lookups_are_right_now_and_then_and_wrong_too() -> None:
    subjects, found = Subjects(), Counter[str]()
    cases = [case for case in (draw_case(0, number) for number in range(400)) if case.lookup is not None]
    for case in [case for case in cases if case.architecture in ("llama", "gpt2") and case.dtype == "float32"]:
        outcome = subjects.run(case)
        assert outcome.verdict == "identical"
        found.update(drafted=outcome.stats.num_looked_up, kept=outcome.stats.num_looked_up_accepted)
    assert 0.1 < found["kept"] / found["drafted"] < 0.9


def test_a_record_of_cases_that_were_drawn_otherwise_is_read_but_not_continued(tmp_path: Path, refused: Any) -> None:
    old = {"command": "c", "seed": 0, "versions": audit.facts("")["versions"], "num_done": 1, "ties": []}
    old |= {"by_dtype": {}, "by_engine": {}, "by_architecture": {}, "by_drafter": {}, "decoded": {"num_emitted": 1}}
    (tmp_path / "result.json").write_text(json.dumps(old | {"failures": [{"case": draw_case(0, 0).to_dict()}]}))
    assert Record.load(tmp_path / "result.json").found_cases == [draw_case(0, 0)]
    assert main(tmp_path, "--replay") == 0
    assert "cases_version: must be 5 to be continued, got None; start anew with --fresh" in refused(main, tmp_path)


def test_the_reference_is_generates_own_with_end_of_text() -> None:
    subjects, ended = Subjects(), 0
    some = [case for case in (draw_case(0, number) for number in range(400)) if case.eos and case.dtype == "float32"]
    for case in some[:20]:
        model = zoo.model_of(case.architecture)
        expected = model.generate(
            torch.tensor([case.prompt]), max_new_tokens=case.budget, do_sample=False, eos_token_id=list(case.eos)
        )
        assert subjects.reference(case) == expected[0, len(case.prompt) :].tolist()
        ended += subjects.reference(case)[-1] in case.eos
    assert ended > 1


def test_an_interrupted_audit_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path, "--cases", "3") == 0
    assert main(tmp_path, "--cases", "6") == 0
    assert "going on after 3 runs" in capsys.readouterr().out
    parts = stored(tmp_path)
    assert main(tmp_path, "--cases", "6", "--fresh") == 0
    whole = stored(tmp_path)
    assert {**parts, "created_at": 0, "commit": 0} == {**whole, "created_at": 0, "commit": 0}
    assert whole["num_done"] == sum(sum(counts.values()) for counts in whole["by_engine"].values()) == 6
    assert main(tmp_path, "--seed", "1") == 2
    assert "seed: must be 1 to be continued, got 0; start anew with --fresh" in capsys.readouterr().err


def accept_one_more(draft_ids: torch.Tensor, *arguments: Any, **options: Any) -> Verdict:
    """A verifier that keeps one draft token too many."""
    verdict = right_verdict(draft_ids, *arguments, **options)
    return replace(verdict, num_accepted=min(len(draft_ids), verdict.num_accepted + 1))


right_verdict = decode.verify


@pytest.mark.slow
def test_a_wrong_token_is_a_failure_in_either_dtype_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(decode, "verify", accept_one_more)
        assert main(tmp_path, "--cases", "30") == 1
        failures = stored(tmp_path)["failures"]
        assert {"float32", "bfloat16"} <= {found["case"]["dtype"] for found in failures}
        assert main(tmp_path, "--replay") == 1
        assert f"{len(failures)} runs, {len(failures)} failures" in capsys.readouterr().out
        assert main(tmp_path, "--replay", str(failures[0]["case"]["number"])) == 1
    assert main(tmp_path, "--replay") == 0


def test_an_exception_is_a_failure_and_the_audit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any, **_named: Any) -> Verdict:
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(decode, "verify", broken)
    assert main(tmp_path, "--cases", "4") == 1
    found = stored(tmp_path)
    assert found["num_done"] == 4
    assert "RuntimeError: no such thing" in {one["error"] for one in found["failures"]}


@pytest.mark.parametrize("content", ["", "[]", '{"seed": 0}', "null"])
def test_a_file_that_is_no_record_is_named(content: str, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "result.json").write_text(content)
    assert "result.json: not a record of this audit" in refused(main, tmp_path)
    assert "--cases: must be at least 1, got 0" in refused(main, tmp_path, "--cases", "0")


def test_the_committed_result_holds_what_is_claimed() -> None:
    record = Record.load(COMMITTED)
    assert record.num_done >= 10_000
    assert record.failures == []
    assert record.by_dtype["float32"]["tie"] == record.by_dtype["float32"]["failure"] == 0
    assert set(record.by_architecture) == set(zoo.NAMES)
    for found in record.ties:
        assert found["dtype"] == "bfloat16"
        assert found["report"]["logit_gap"] <= found["report"]["tolerance"]
    drafted, accepted = record.decoded["num_drafted"], record.decoded["num_accepted"]
    assert 0.1 < accepted / drafted < 0.9
    assert record.by_drafter.keys() == {"layer_skip", "prompt_lookup", "suffix", "hybrid"}
    assert min(sum(counts.values()) for counts in record.by_drafter.values()) > 1_000
    assert 0.1 < record.decoded["num_looked_up_accepted"] / record.decoded["num_looked_up"] < 0.9
