"""Decoding beside another program: every kind of process is measured, and how threads wait is what was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies.shared_cores.run import ROOT, main

DEMO = ROOT / "studies" / "demo"


@pytest.mark.slow
def test_every_kind_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    command = ["--config", str(DEMO / "best.json"), "--prompts", str(DEMO / "held_out.jsonl"), "--num-prompts", "1"]
    command += ["--new-tokens", "4", "--spin-counts", "1000", "--threads", "1", "--repeats", "1", "--out", str(out)]
    assert main(command) == 0
    found = json.loads(out.read_text(encoding="utf-8"))["found"]
    assert [(one["kernels"], one["is_alone"]) for one in found] == [
        (k, a) for k in (True, False) for a in (True, False)
    ]
    assert all(set(one["tokens_per_s"]) == {"plain", "speculative"} for one in found)
    assert all((one["other_per_s"] is None) == one["is_alone"] for one in found)
    assert all(one["is_alone"] or one["other_per_s"] > 0 for one in found)
    assert "| kernels | 1000 | " in capsys.readouterr().out


def test_the_other_process_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "studies.shared_cores.other_process", "1"]
    told = subprocess.run(command, cwd=ROOT, input="\n", capture_output=True, text=True, check=True).stdout
    assert told == "0\n"


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeats", "0"]) == 2
    assert "--repeats: must be at least 1, got 0" in capsys.readouterr().err
