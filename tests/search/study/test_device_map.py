"""Searching a model that is larger than a device: under a map, resumed under the same one only, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerskip import DecodeConfig, LayerSkipModel
from layerskip.huggingface.loading import weights_fingerprint
from search import compare as compare_command
from search import tune
from search.study.spec import load_spec, to_toml
from search.workers.device import computing_on, share_a_device
from search.workers.process import process_token
from search.workers.roster import Worker
from tests.layerskip.zoo import SPREAD
from tests.search.test_commands import changed, run_main

MAP: dict[str, int | str] = SPREAD | {"lm_head": "cpu"}
MAP_TEXT = (
    "model.embed_tokens, model.rotary_emb, model.layers.0: cpu; model.layers.1: disk; model.layers.2: cpu; "
    "model.layers.3: disk; model.norm, lm_head: cpu"
)


def under_map(flags: list[str], device_map: Any) -> list[str]:
    text = device_map if isinstance(device_map, str) else json.dumps(device_map)
    return [*changed(flags, device="auto"), "--device-map", text]


@pytest.mark.slow
def test_a_search_under_a_map(tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = under_map(tiny_study, MAP)
    assert run_main(flags) == 0
    study = tmp_path / "study"
    best = DecodeConfig.load(study / "best.json")
    assert best.provenance.engine == "eager"
    summary = json.loads((study / "summary.json").read_text())
    assert (summary["trials"]["counted"], summary["not_lossless"]) == (4, [])
    # The config is for the model, wherever its weights are.
    plain = LayerSkipModel.from_config(study / "best.json", device="cpu")
    spread = LayerSkipModel.from_config(study / "best.json", device_map=MAP)
    assert spread.placement.is_offloaded
    assert plain.generate("w1 w2", max_new_tokens=6).ids == spread.generate("w1 w2", max_new_tokens=6).ids
    capsys.readouterr()
    # The folder alone goes on under the same map.
    assert run_main(["--study", str(study), "--trials", "5"]) == 0
    assert "4 of 5 trials done" in capsys.readouterr().out
    # Another map, or none, is another study.
    other = MAP | {"model.layers.1": "cpu"}
    for text, now in ((json.dumps(other), MAP_TEXT.replace("model.layers.1: disk; ", "")), ("auto", "None")):
        assert run_main(["--study", str(study), "--device-map", text, "--engine", "eager"]) == 2
        error = capsys.readouterr().err
        assert f"device_map was '{MAP_TEXT}', now " in error
        assert error.count("\n") <= 2  # the warning of offloaded weights, and the error
        assert now.partition(",")[0] in error


@pytest.mark.slow
def test_a_map_that_ends_on_one_device_is_no_map(tiny_study: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` where everything fits goes on with a study of that device, and the other way round."""
    assert run_main(changed(tiny_study, trials="1")) == 0
    assert run_main([*changed(tiny_study, trials="1", device="auto"), "--device-map", "auto"]) == 0
    assert "1 of 1 trials done" in capsys.readouterr().out


def test_a_map_is_kept_in_study_toml(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('model = "m"\nprompts = "p"\ndevice_map = { "" = "disk", "lm_head" = 1 }\n')
    spec, _ = load_spec({}, str(tmp_path), demo=tmp_path)
    assert spec.device_map == {"": "disk", "lm_head": 1}
    (tmp_path / "study.toml").write_text(to_toml(spec, tmp_path))
    assert load_spec({}, str(tmp_path), demo=tmp_path)[0] == spec


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('device_map = "cuda:0"', "device_map: must be auto, balanced, balanced_low_0, sequential, or module names"),
        ('device_map = { "a(" = 0 }', "device_map: keys must be names of modules"),
        ("device_map = { lm_head = -1 }", "device_map.lm_head: must be a device's number"),
        ("device_map = {}", "device_map: must be auto, "),
        ("device_map = 3", "device_map"),
        ('device = "cpu"\ndevice_map = "auto"', "device: must be 'auto' beside a device_map"),
    ],
)
def test_a_bad_map_in_the_file_names_it(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(f'model = "m"\nprompts = "p"\n{line}\n')
    with pytest.raises(ValueError, match="^" + str(tmp_path / "study.toml")) as caught:
        load_spec({}, str(tmp_path), demo=tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--devices", "cpu,cpu"], ["--devices", "cpu"]], ids=str)
def test_several_workers_on_a_host_and_a_map_are_refused(
    flags: list[str], tiny_study: list[str], tmp_path: Path, refused: Any
) -> None:
    error = refused(run_main, [*under_map(tiny_study, "auto"), *flags])
    assert "device_map: spreads one worker over all devices of this host, so --workers and --devices" in error
    assert not (tmp_path / "study").exists()


def test_torchrun_is_refused(
    tiny_study: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: Any,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = refused(run_main, tiny_study)
    assert "WORLD_SIZE: must be 1" in error
    assert "--devices cuda:0,cuda:1" in error
    assert "--device-map auto" in error
    assert not (tmp_path / "study").exists()
    assert compare_command.main(["--study", str(tmp_path)]) == 2
    assert "WORLD_SIZE: must be 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_is_dispatched_already_is_tuned(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    expected = weights_fingerprint(model)
    dispatch_model(model, MAP, offload_dir=tmp_path / "weights")
    prompts = [f"w{i} w{i + 1} w3" for i in range(12)]
    options: dict[str, Any] = {"max_new_tokens": 8, "gamma_max": 4, "trial_seconds": 0.1, "quiet": True}
    study = tmp_path / "study"
    config = tune(model, AutoTokenizer.from_pretrained(tiny_model), prompts, trials=2, study=study, **options)
    assert config.provenance.weights_fingerprint == expected
    spec, _ = load_spec({}, str(study), demo=study)
    assert (spec.device, spec.device_map) == ("auto", MAP)


def test_a_worker_on_several_accelerators_is_seen_on_each_of_them() -> None:
    first, second = torch.device("xpu:0"), torch.device("xpu:1")
    facts = computing_on(first, second)
    other = Worker(1, process_token(), facts=computing_on(second))
    assert share_a_device(facts, other)
    assert share_a_device(computing_on(second), Worker(2, process_token(), facts=facts))
    assert not share_a_device(computing_on(torch.device("xpu:2")), Worker(2, process_token(), facts=facts))
    assert computing_on(first) == {"unit": "xpu:0"}
