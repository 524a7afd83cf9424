"""The published model's prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip.prompts import read_prompts
from studies.smollm2 import make_prompts


@pytest.mark.slow
def test_no_prompt_to_train_on_tunes_or_judges(tmp_path: Path) -> None:
    file = tmp_path / "training.jsonl"
    assert make_prompts.main(["--training", str(file)]) == 0
    training = {one.fingerprint: one for one in read_prompts(file)}
    judging = [one for name in ("tuning.jsonl", "held_out.jsonl") for one in read_prompts(make_prompts.HERE / name)]
    assert len(training) > 100
    assert not training.keys() & {one.fingerprint for one in judging}
    assert {one.group for one in training.values()} <= {one.group for one in judging}
