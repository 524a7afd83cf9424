"""A search with trained draft weights, from the command that makes them to the config that decodes with them."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from safetensors.torch import load_file, save_file

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, train
from layerskip.drafters.draft_weights import describe_weights
from layerskip.engines import choice
from layerskip.engines.recording.graph_pool import RerunRecorder
from search import report, run
from tests.layerskip import zoo
from tests.search.conftest import tiny_flags
from tests.search.helpers.fakes import Bench
from tests.search.helpers.studies import trials_of


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 3} w5"}) + "\n" for i in range(24)))
    given = ["--model", str(tiny_model), "--data", str(prompts), "--out", str(folder / "weights"), "--device", "cpu"]
    assert train.main([*given, "--steps", "40", "--window", "24", "--new-tokens", "16", "--learning-rate", "0.02"]) == 0
    return folder / "weights"


@pytest.mark.slow
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
    assert all(seconds > 0 for seconds in summary["costs"]["first"]["weights_s"].values())
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


@pytest.mark.slow
def test_a_models_own_layer_is_searched_without_being_asked_for(tmp_path: Path, capsys: Any) -> None:
    folder = zoo.mtp_folder(zoo.WITH_MTP[0])
    flags = [*tiny_flags(folder, tmp_path), "--force"]
    assert run.main(flags) in (0, 1)
    predicted = next(line for line in capsys.readouterr().out.splitlines() if "predicted by drafter" in line)
    assert {"mtp", "hybrid_mtp"} <= set(re.findall(r"\w+", predicted))
    only = [*flags, "--study", str(tmp_path / "only"), "--drafters", "mtp", "--trials", "3"]
    assert run.main(only) in (0, 1)
    assert {trial.user_attrs["drafter"] for trial in trials_of(tmp_path / "only")} == {"mtp"}
    # What is exported is decoded with, and found with the model.
    summary = json.loads((tmp_path / "only" / "summary.json").read_text())
    found = DecodeConfig(**summary["candidates"][0]["config"]).bare()
    found.model_copy(update={"target_threshold": 0.0}).save(tmp_path / "mtp.json")
    model = LayerSkipModel.from_pretrained(folder, config=tmp_path / "mtp.json", device="cpu", dtype="float32")
    plain = model.generate("w1 w2 w3", max_new_tokens=8, config=DecodeConfig.plain(model.num_layers))
    out = model.generate("w1 w2 w3", max_new_tokens=8)
    assert out.ids == plain.ids
    assert out.stats.num_drafted


def test_a_layer_that_the_model_does_not_have_is_not_searched(tiny_study: list[str], refused: Any) -> None:
    error = refused(run.main, [*tiny_study, "--drafters", "mtp,layer_skip"])
    assert "drafters: mtp need a model whose config tells of multi-token" in error


@pytest.mark.slow
def test_they_are_searched_on_recorded_work(
    weights: Path, tiny_study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `cuda_graph`, on the CPU, where recordings are played by running their work again: nothing is recorded while a
    clock runs, and what is predicted is what is decoded."""
    monkeypatch.setattr(choice, "_has_graphs", lambda _device: True)
    monkeypatch.setattr(choice, "_compiles", lambda _device: False)
    monkeypatch.setattr(choice, "CudaRecorder", lambda _device: RerunRecorder())
    drafters = ["--drafters", "eagle,hybrid_eagle,layer_skip", "--draft-weights", str(weights), "--force"]
    given = [*tiny_study, *drafters, "--engine", "cuda_graph", "--sampler", "random", "--trials", "24"]
    assert run.main(given) in (0, 1)
    trials = trials_of(tmp_path / "study")
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert {trial.user_attrs["drafter"] for trial in trials} == {"eagle", "hybrid_eagle", "layer_skip"}
    assert {trial.params.get("weights.tree_tokens") for trial in trials} >= {0, 4}
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert summary["fingerprint"]["engine"] == "cuda_graph"


def test_few_ways_are_searched_alone(weights: Path, tiny_study: list[str], tmp_path: Path) -> None:
    given = ["--drafters", "eagle,suffix", "--draft-weights", str(weights), "--force", "--trials", "3"]
    assert run.main([*tiny_study, *given]) in (0, 1)
    assert {trial.user_attrs["drafter"] for trial in trials_of(tmp_path / "study")} <= {"eagle", "suffix"}


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


@pytest.fixture(scope="module")
def draft_models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that is the model itself, and one whose last layers do nothing."""
    same, other = (tmp_path_factory.mktemp("draft_models") / name for name in ("same", "other"))
    shutil.copytree(tiny_model, same)
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    for name, value in weights.items():
        if name.startswith(("model.layers.2", "model.layers.3")) and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            value.zero_()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return same, other


@pytest.mark.slow
def test_several_weights_compete_in_one_study(
    weights: Path, draft_models: tuple[Path, Path], tiny_study: list[str], tmp_path: Path, capsys: Any
) -> None:
    folders = [weights, *draft_models]
    common = [*tiny_study, "--drafters", "eagle,draft_model,hybrid_draft_model", "--force"]
    common += ["--draft-weights", ",".join(map(str, folders))]
    assert run.main([*common, "--trials", "8"]) in (0, 1)
    assert run.main(["--study", str(tmp_path / "study"), "--trials", "14"]) in (0, 1)
    trials = trials_of(tmp_path / "study")
    assert len(trials) == 14
    assert {trial.user_attrs["draft_weights"]["path"] for trial in trials} <= set(map(str, folders))
    for trial in trials:
        drafter = trial.user_attrs["drafter"].removeprefix("hybrid_")
        assert trial.user_attrs["draft_weights"]["drafter"] == drafter
        expected = Path(trial.user_attrs["draft_weights"]["path"]).name if drafter == "draft_model" else None
        assert trial.params.get("draft_model.weights") == expected
        # The model itself is never wrong.
        if expected == "same" and trial.user_attrs["drafter"] == "draft_model":
            assert trial.user_attrs.get("acceptance_rate", 1.0) == 1.0
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    fingerprints = {describe_weights(one).fingerprint for one in folders}
    assert {name.split()[0] for name in summary["costs"]["first"]["weights_s"]} == fingerprints
    pool = json.loads(Bench(tmp_path / "study", in_sqlite=True).study().user_attrs["pool"])
    by = {tuple(row[0].split(":")[:2]) for row in pool}
    assert by == {("weights", one) for one in fingerprints}  # which is measured, the clock says
    capsys.readouterr()
    assert report.main([str(tmp_path / "study")]) == 0
    page = (tmp_path / "study" / "report.html").read_text()
    assert "draft_model same" in page or "draft_model other" in page
    # Others in the same order, or another number of them, are another study.
    fewer = [*tiny_study, "--drafters", "draft_model", "--force", "--draft-weights", str(draft_models[0])]
    assert run.main([*fewer, "--trials", "15"]) == 2
    assert "draft_weights was" in capsys.readouterr().err


@pytest.mark.slow
def test_a_draft_model_with_another_tokenizer_is_searched_too(
    draft_models: tuple[Path, Path], tiny_study: list[str], tmp_path: Path
) -> None:
    """The same model, whose words have their ids the other way round."""
    folder = shutil.copytree(draft_models[0], tmp_path / "turned")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: len(words) - 1 - i for word, i in words.items()}
    for one in tokenizer["added_tokens"]:
        one["id"] = len(words) - 1 - one["id"]
    file.write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    given = ["--drafters", "draft_model,hybrid_draft_model", "--draft-weights", str(folder), "--force", "--trials", "5"]
    assert run.main([*tiny_study, *given]) in (0, 1)
    trials = trials_of(tmp_path / "study")
    assert len(trials) == 5
    assert {one.user_attrs["draft_weights"]["path"] for one in trials} == {str(folder)}
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert summary["replay"]["exact_share"] > 0.5
    config = DecodeConfig(
        drafter="draft_model", skip_mask=SkipMask.none(4), gamma=3, draft_weights=describe_weights(folder)
    )
    model = LayerSkipModel.from_pretrained(tiny_study[tiny_study.index("--model") + 1], device="cpu", engine="fused")
    out = model.generate("w1 w2 w3", max_new_tokens=12, config=config)
    assert out.ids == model.generate("w1 w2 w3", max_new_tokens=12).ids
    assert out.stats.num_drafted


def test_weights_that_nothing_drafts_by_or_that_are_the_same_are_refused(
    weights: Path, draft_models: tuple[Path, Path], tiny_study: list[str], tmp_path: Path, refused: Any
) -> None:
    same = draft_models[0]
    shutil.copytree(same, tmp_path / "copy")
    for given, said in (
        (["--drafters", "eagle", "--draft-weights", f"{weights},{same}"], "is for draft_model and hybrid_draft_model"),
        (["--drafters", "eagle", "--draft-weights", str(same)], "eagle cannot draft by"),
        (["--draft-weights", f"{same},{tmp_path / 'copy'}"], "must be different ones, got the same in"),
        (["--draft-weights", f"{same},{same}"], "must name each once"),
    ):
        assert said in refused(run.main, [*tiny_study, *given])
    assert not (tmp_path / "study").exists()


def test_what_is_missing_is_said_before_anything_is_written(
    tiny_study: list[str], tmp_path: Path, refused: Any
) -> None:
    assert "draft_weights: are required to search eagle" in refused(run.main, [*tiny_study, "--drafters", "eagle"])
    error = refused(run.main, [*tiny_study, "--drafters", "suffix", "--draft-weights", str(tmp_path)])
    assert "draft_weights: must be left out where drafters has none of eagle, draft_model" in error
    assert "has no config.json" in refused(run.main, [*tiny_study, "--draft-weights", str(tmp_path)])
    assert not (tmp_path / "study").exists()
