"""A search with trained draft weights, from the command that makes them to the config that decodes with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from layerskip import DecodeConfig, LayerSkipModel, train
from search import report, run
from search.storages.opening import open_storage


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 3} w5"}) + "\n" for i in range(24)))
    given = ["--model", str(tiny_model), "--data", str(prompts), "--out", str(folder / "weights"), "--device", "cpu"]
    assert train.main([*given, "--steps", "40", "--window", "24", "--new-tokens", "16", "--learning-rate", "0.02"]) == 0
    return folder / "weights"


def trials_of(folder: Path) -> list[FrozenTrial]:
    storage = open_storage(f"sqlite:///{folder / 'study.db'}")
    return optuna.load_study(study_name=folder.name, storage=storage).get_trials()


def test_they_are_searched_confirmed_exported_and_shown(
    weights: Path, tiny_study: list[str], tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    common = [*tiny_study, "--draft-weights", str(weights), "--force"]
    assert run.main([*common, "--trials", "6"]) in (0, 1)
    assert run.main([*common, "--trials", "9"]) in (0, 1)
    said = capsys.readouterr().out
    assert "predicted by drafter" in said
    trials = trials_of(tmp_path / "study")
    ways = Counter(trial.user_attrs["drafter"] for trial in trials)
    assert len(trials) == 9
    assert ways["eagle"] >= 1
    assert ways["hybrid_eagle"] >= 1
    by_weights = [trial for trial in trials if "eagle" in trial.user_attrs["drafter"]]
    assert {trial.user_attrs["draft_weights"]["path"] for trial in by_weights} == {str(weights)}
    assert any(drafts > 0 for trial in by_weights for drafts, _, _ in trial.user_attrs["replayed_forwards"])
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert summary["pool"]["num_predicted"] > 12
    assert summary["costs"]["first"]["weights_s"] > 0
    eagles = [one for one in summary["candidates"] if one["config"]["drafter"] == "eagle"]
    assert eagles
    # What the study kept is what the decoder loads, wherever the folder lies.
    config = DecodeConfig(**eagles[0]["config"]).bare().model_copy(update={"target_threshold": 0.0})
    config.save(tmp_path / "eagle.json")
    model = LayerSkipModel.from_pretrained(tiny_model, device="cpu", engine="fused")
    plain = model.generate("w1 w2 w3", max_new_tokens=8)
    out = model.generate("w1 w2 w3", max_new_tokens=8, config=DecodeConfig.load(tmp_path / "eagle.json"))
    assert out.ids == plain.ids
    assert out.stats.num_drafted
    assert report.main([str(tmp_path / "study")]) == 0
    assert "eagle" in (tmp_path / "study" / "report.html").read_text()


@pytest.mark.parametrize("drafters", ["hybrid_eagle", "eagle,suffix"])
def test_few_ways_are_searched_alone(weights: Path, tiny_study: list[str], tmp_path: Path, drafters: str) -> None:
    given = ["--drafters", drafters, "--draft-weights", str(weights), "--force", "--trials", "3"]
    assert run.main([*tiny_study, *given]) in (0, 1)
    assert {trial.user_attrs["drafter"] for trial in trials_of(tmp_path / "study")} <= set(drafters.split(","))


def test_a_study_goes_on_with_its_own_weights_alone(
    weights: Path, tiny_study: list[str], tmp_path: Path, capsys: Any
) -> None:
    common = [*tiny_study, "--drafters", "eagle", "--force"]
    assert run.main([*common, "--trials", "2", "--draft-weights", str(weights)]) in (0, 1)
    capsys.readouterr()
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((weights / "config.json").read_text())
    (other / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"fingerprint": "0" * 16}))
    assert run.main([*common, "--trials", "3", "--draft-weights", str(other)]) == 2
    assert "its fingerprint differs" in capsys.readouterr().err
    assert run.main(["--study", str(tmp_path / "study"), "--trials", "3"]) in (0, 1)  # study.toml names the weights
    assert {trial.user_attrs["drafter"] for trial in trials_of(tmp_path / "study")} == {"eagle"}
    assert len(trials_of(tmp_path / "study")) == 3


def test_what_is_missing_is_said_before_anything_is_written(tiny_study: list[str], tmp_path: Path, capsys: Any) -> None:
    assert run.main([*tiny_study, "--drafters", "eagle"]) == 2
    assert "draft_weights: are required to search eagle" in capsys.readouterr().err
    assert run.main([*tiny_study, "--drafters", "suffix", "--draft-weights", str(tmp_path)]) == 2
    assert "draft_weights: must be left out where drafters has none of eagle, draft_model" in capsys.readouterr().err
    assert run.main([*tiny_study, "--draft-weights", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()
