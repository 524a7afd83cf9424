"""What the machine's own settings do to decoding: pages, and threads that wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies.machine import huge_pages
from studies.machine.teams import main
from studies.scaling.servers import ROOT
from tests.layerskip.engines.test_native import needs_kernels

DEMO = ROOT / "studies" / "demo"


@pytest.mark.slow
def test_every_kind_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    command = ["--model", str(DEMO / "model"), "--dtype", "float32", "--prompts", str(DEMO / "held_out.jsonl")]
    assert main([*command, "--seconds", "0.1", "--threads", "1", "--repeats", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))["found"]
    places = ("alone", "in a second thread", "beside another program")
    assert [(one["kernels"], one["place"]) for one in found[::2]] == [(k, p) for k in (True, False) for p in places]
    assert [one["is_watched"] for one in found] == [True, False] * 6
    assert all(set(one["tokens_per_s"]) == {"plain", "speculative"} for one in found)
    assert all((one["other_per_s"] is None) == (one["place"] != places[2]) for one in found)
    assert all(one["other_per_s"] is None or one["other_per_s"] > 0 for one in found)
    assert "| kernels | alone | " in capsys.readouterr().out


def test_the_other_process_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "studies.machine.other_process", "1"]
    told = subprocess.run(command, cwd=ROOT, input="\n", capture_output=True, text=True, check=True).stdout
    assert told == "0\n"


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none"), "--prompts", str(DEMO / "held_out.jsonl")]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "none") in told
    assert told.count("\n") == 1


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeats", "0"]) == 2
    assert "--repeats: must be at least 1, got 0" in capsys.readouterr().err


@needs_kernels
@pytest.mark.slow
def test_both_kinds_of_pages_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pages.json"
    command = ["--model", str(DEMO / "model"), "--mask", "int8", "--new-tokens", "8", "--rounds", "2", "--repeats", "2"]
    assert huge_pages.main([*command, "--threads", "1", "--out", str(out)]) == 0
    repeats = json.loads(out.read_text(encoding="utf-8"))["repeats"]
    assert [set(one) for one in repeats] == [{"huge", "ordinary"}] * 2
    assert all(ms > 0 for one in repeats for times in one.values() for ms in times.values())
    assert "| a drafted token | " in capsys.readouterr().out
