"""python -m layerskip.doctor: says what works, and notices what does not."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import layerskip.decoding.loop
from layerskip import LayerSkipModel
from layerskip.analysis.identity import float32_command
from layerskip.doctor import examine, main
from layerskip.rounds.verifier import Verdict

DEMO_MODEL = Path(__file__).parents[2] / "studies" / "demo" / "model"


def test_reports_a_healthy_model(capsys) -> None:
    assert main([str(DEMO_MODEL), "--device", "cpu", "--tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is True
    assert report["model_class"] == "LlamaForCausalLM"
    assert report["num_layers"] == 12
    assert report["skippable"] == "attention, MLP and whole layers"
    assert len(report["checks"]) >= 12
    assert all(check["passed"] for check in report["checks"])
    lookups = [check["detail"] for check in report["checks"] if check["name"].startswith("lookup in an earlier")]
    accepted, drafted = re.search(r", (\d+) of (\d+) looked-up", "".join(lookups)).groups()
    assert 0 < int(accepted) < int(drafted)


def test_prints_the_verdict_for_a_person(capsys) -> None:
    assert main([str(DEMO_MODEL), "--device", "cpu", "--tokens", "4", "--engine", "eager"]) == 0
    assert "works: every output is the target's own" in capsys.readouterr().out


@pytest.mark.slow
def test_in_reduced_precision_it_names_the_command_that_proves_the_code(capsys) -> None:
    model = str(DEMO_MODEL)
    assert main([model, "--device", "cpu", "--dtype", "bfloat16", "--tokens", "2", "--engine", "eager"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    said = "in bfloat16 ties pass; the proof of the code is identity in float32: python -m layerskip.doctor "
    assert last.startswith(said)
    assert main([*shlex.split(last.removeprefix(said)), "--tokens", "2", "--json", "--engine", "eager"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dtype"], report["device"], report["proof"]) == ("float32", "cpu", None)
    assert float32_command("a b", trust_remote_code=True) == (
        "python -m layerskip.doctor 'a b' --trust-remote-code --dtype float32"
    )


@pytest.mark.slow
def test_notices_a_draft_that_reads_wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy output stays identical under a wrong draft, so the check of the draft's logits has to catch it."""
    model = LayerSkipModel.from_pretrained(DEMO_MODEL, device="cpu", engine="eager")
    arange = torch.arange

    def stale(*args: int, **kwargs: object) -> torch.Tensor:
        # A single-token step takes its position from a length that a skipped layer never advanced.
        return arange(1, **kwargs) if len(args) == 2 and args[1] - args[0] == 1 else arange(*args, **kwargs)

    monkeypatch.setattr("layerskip.huggingface.adapter.torch.arange", stale)
    failed = [check.name for check in examine(model, num_tokens=8) if not check.passed]
    assert any(name.startswith("draft logits") for name in failed)


@pytest.mark.slow
def test_notices_a_lookup_that_is_believed_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LayerSkipModel.from_pretrained(DEMO_MODEL, device="cpu", engine="eager")
    right = layerskip.decoding.loop.verify

    def believes(draft_ids: torch.Tensor, *arguments: Any, **options: bool) -> Verdict:
        return replace(right(draft_ids, *arguments, **options), num_accepted=len(draft_ids))

    monkeypatch.setattr(layerskip.decoding.loop, "verify", believes)
    failed = {check.name for check in examine(model, num_tokens=12) if not check.passed}
    assert "lookup in an earlier text, gamma 8" in failed
    assert "plain decoding" not in failed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["./nosuch"], "no such folder: ./nosuch"),
        ([str(DEMO_MODEL), "--tokens", "0"], "--tokens: must be at least 1, got 0"),
        ([str(DEMO_MODEL.parent)], "is a folder without a config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], expected: str, refused) -> None:
    err = refused(main, arguments)
    assert expected in err
