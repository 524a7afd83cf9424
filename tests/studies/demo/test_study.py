"""The demo's finished study, as the repository keeps it: the one that its results are of, and nothing of a machine."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

from layerskip import Confirmed, DecodeConfig
from layerskip.config.strict_json import in_six_digits
from search.compact import read_lines
from search.reporting.archive import read_archive

DEMO = Path(__file__).parents[3] / "studies" / "demo"
ARCHIVE = DEMO / "study.jsonl.xz"

pytestmark = pytest.mark.skipif(not ARCHIVE.is_file(), reason="the demo has not been searched since archives are kept")


def test_the_archive_is_of_the_study_that_best_json_and_summary_json_are_of() -> None:
    study = optuna.load_study(study_name="demo", storage=read_archive(ARCHIVE))
    best = DecodeConfig.load(DEMO / "best.json")
    summary = json.loads((DEMO / "summary.json").read_text(encoding="utf-8"))
    assert best.confirmed is not None
    assert len(study.get_trials()) == best.provenance.num_trials
    assert Confirmed.model_validate(study.user_attrs["confirmed"]) == best.confirmed
    assert in_six_digits(study.user_attrs["confirmed"]) == summary["confirmed"]
    assert study.user_attrs["config"] == summary["config"]
    plain = study.user_attrs["plain_tokens_per_s"]
    assert in_six_digits(plain) == summary["reference"]["plain_tokens_per_s"]


def test_the_archive_names_no_folder_of_the_machine_it_was_made_on() -> None:
    (spec,) = (line["user_attr"]["spec"] for line in read_lines(ARCHIVE) if "spec" in line.get("user_attr", {}))
    paths = {name: spec[name] for name in ("model", "prompts", "held_out")}
    assert paths == {"model": "./model", "prompts": "./tuning.jsonl", "held_out": "./held_out.jsonl"}
    assert not spec["storage"].startswith("sqlite:////")
