"""The published model's prompts, and what rounding its weights does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from layerskip.prompts import read_prompts
from studies.results import STUDIES
from studies.smollm2 import make_prompts, quantization


@pytest.mark.slow
def test_no_prompt_to_train_on_tunes_or_judges(tmp_path: Path) -> None:
    file = tmp_path / "training.jsonl"
    assert make_prompts.main(["--training", str(file)]) == 0
    training = {one.fingerprint: one for one in read_prompts(file)}
    judging = [one for name in ("tuning.jsonl", "held_out.jsonl") for one in read_prompts(make_prompts.HERE / name)]
    assert len(training) > 100
    assert not training.keys() & {one.fingerprint for one in judging}
    assert {one.group for one in training.values()} <= {one.group for one in judging}


@pytest.mark.slow
def test_a_change_is_asked_to_one_function_of_a_module(tmp_path: Path) -> None:
    file = tmp_path / "changes.jsonl"
    assert make_prompts.main(["--changes", str(file)]) == 0
    made, kept = (read_prompts(one) for one in (file, STUDIES / "qwen_coder" / "changes.jsonl"))
    assert len(made) == len(kept) == 16
    for one in [*made, *kept]:
        ((_, content),) = one.messages
        change, code = content.split("\n\n", 1)
        assert change.endswith("Answer with the whole function.")
        assert code.startswith("```python\ndef ")


def test_distributions_are_compared_place_by_place() -> None:
    whole = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    own = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.2, 0.0]]).log()
    found = quantization.compared(own, whole, torch.tensor([0, 1]))
    assert found["perplexity"] == pytest.approx(math.sqrt(4 * 5))
    assert found["same_likeliest"] == 0.5
    assert found["overlap"] == pytest.approx((0.75 + 0.9) / 2)


def test_more_bits_keep_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao", reason="needs the extra `quantized`")
    prompts = tmp_path / "prompts.jsonl"
    held_out = (STUDIES / "demo" / "held_out.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(held_out[:3]))
    out = tmp_path / "quantization.json"
    given = ["--model", str(STUDIES / "demo" / "model"), "--prompts", str(prompts), "--out", str(out)]
    assert quantization.main([*given, "--new-tokens", "16"]) == 0
    record = json.loads(out.read_text())
    assert (record["num_positions"], record["number_format"]) == (48, "float32")
    whole, by_8, by_4 = record["rows"].values()
    assert (whole["same_likeliest"], whole["overlap"]) == (1.0, pytest.approx(1.0))
    assert 0.8 < by_4["overlap"] < by_8["overlap"] < 1.0
    assert f"| int4 | {by_4['perplexity']:.2f} | " in capsys.readouterr().out
