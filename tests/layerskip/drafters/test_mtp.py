"""Multi-token-prediction layers of a model's own checkpoint: loaded, believed, refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import MTPCandidateGenerator

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, doctor, generate
from layerskip.benchmark.run import Plan, run_benchmark
from layerskip.config.decode_config import DraftWeights
from layerskip.engines.native import library
from layerskip.huggingface.mtp import generates_with, load_mtp
from tests.layerskip import zoo
from tests.layerskip.tape import graph_model

PROMPT = (3, 5, 8, 3, 5, 9, 3, 5)
RUN = zoo.WITH_MTP[0]
ANY = DraftWeights(drafter="mtp", path="model", fingerprint="")


def mtp(weights: DraftWeights = ANY, gamma: int = 3, **more: Any) -> DecodeConfig:
    mask = SkipMask.none(zoo.NUM_LAYERS)
    return DecodeConfig(drafter="mtp", skip_mask=mask, gamma=gamma, draft_weights=weights, **more)


@pytest.fixture
def folder() -> Path:
    return zoo.mtp_folder(RUN)


@pytest.mark.parametrize("run", zoo.WITH_MTP)
def test_its_first_drafts_have_the_logits_of_transformers_own(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, model = zoo.mtp_of(run), zoo.layerskip_of(run)
    model.check_config(mtp(weights))
    known: list[tuple[list[int], torch.Tensor]] = []
    of_transformers = MTPCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = of_transformers(self, input_ids, *args, **kwargs)
        if logits is not None:
            known.append((input_ids[0].tolist(), logits[0, 0]))
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watched)
    with generates_with(load_mtp(model.adapter)):
        prompt = torch.tensor([PROMPT])
        out = model.model.generate(prompt, max_new_tokens=zoo.LONGEST, do_sample=False, use_mtp=True)
    assert out[0, len(PROMPT) :].tolist() == list(zoo.greedy_reference(run, PROMPT))
    assert len(known) > 5
    engine: Any = model.engine
    head = engine.draft_weights["model"]
    for ids, expected in known:
        with torch.inference_mode(), engine.session(len(ids)):
            engine.keep_states()
            engine.forward(torch.tensor(ids[:-1]))
            state = head.new_text(len(ids)).follow(engine, torch.tensor(ids[1:]), 0)
            torch.testing.assert_close(head.logits(engine, state, None)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("with_whole_drafts")  # the output embedding is rounded for drafts
@pytest.mark.parametrize("by_torch", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_over_lean_layers_it_drafts_what_it_does_over_modules(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_torch:
        monkeypatch.setattr(library, "load_kernels", lambda: "no C++ compiler")
    model = zoo.build("llama", num_mtp_layers=1)
    model.config.name_or_path = str(zoo.with_mtp_layer(model))
    by_modules, lean = LayerSkipModel(model, engine="eager"), LayerSkipModel(model, engine="fused")
    weights = by_modules.mtp_weights()
    kept = 0
    for config in (mtp(weights), mtp(weights, siblings=1), mtp(weights.branching(6)), mtp(weights.narrowed(20))):
        for choice in ({}, {"do_sample": True, "seed": 3}):
            expected, found = (
                one.generate(PROMPT, max_new_tokens=zoo.LONGEST, config=config, **choice) for one in (by_modules, lean)
            )
            assert found.ids == expected.ids
            assert found.stats.counters() == expected.stats.counters()
            kept += found.stats.num_accepted
    assert kept > 20


def test_what_is_loaded_leaves_the_model_as_it_was(folder: Path) -> None:
    model = LayerSkipModel.from_pretrained(folder, device="cpu", dtype="float32", engine="eager")
    before, own = model.weights_fingerprint(), dict(vars(model.model))
    weights = model.mtp_weights()
    assert (weights.drafter, weights.path, weights.fingerprint) == ("mtp", "model", zoo.mtp_of(RUN).fingerprint)
    assert model.mtp_weights() == weights
    model.check_config(mtp(weights))
    assert vars(model.model) == own
    model._fingerprint = None
    assert model.weights_fingerprint() == before
    assert all(one.requires_grad for one in model.model.parameters())
    assert model.generate(PROMPT, max_new_tokens=12).ids == list(zoo.greedy_reference(RUN, PROMPT)[:12])


def test_a_config_names_the_layer_by_its_model_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "model").mkdir(parents=True)
    path = tmp_path / "deep" / "best.json"
    mtp(zoo.mtp_of(RUN)).save(path)
    config = DecodeConfig.load(path)
    assert config.draft_weights == zoo.mtp_of(RUN)
    model = LayerSkipModel.from_pretrained(folder, config=config, device="cpu", dtype="float32")
    out = model.generate(PROMPT, max_new_tokens=zoo.LONGEST)
    assert out.ids == list(zoo.greedy_reference(RUN, PROMPT))
    assert 0 < out.stats.num_accepted < out.stats.num_drafted
    with pytest.raises(OSError, match=r"me/model|hub|offline"):  # and nothing about a folder of this machine
        config.push_to_hub("me/model", token="none")


def test_it_is_tried_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(folder), "--prompt", "w3 w5 w8 w3 w5 w9", "--max-new-tokens", "12", "--device", "cpu"]
    assert generate.main([*common, "--drafter", "mtp", "--gamma", "2", "--compare"]) == 0
    assert "tokens identical: yes" in capsys.readouterr().err
    assert generate.main([*common, "--drafter", "mtp", "--gamma", "2", "--draft-weights", str(folder)]) == 2
    assert "--draft-weights: is nothing that mtp has" in capsys.readouterr().err
    assert generate.main([*common, "--drafter", "mtp"]) == 2
    assert "--drafter mtp: needs --gamma" in capsys.readouterr().err


def test_the_doctor_tries_it_where_it_lies(folder: Path, tmp_path: Path) -> None:
    def told(at: Path) -> list[doctor.Check]:
        model = LayerSkipModel.from_pretrained(at, device="cpu", dtype="float32", engine="eager")
        return [one for one in doctor.examine(model, num_tokens=12) if "multi-token" in one.name]

    [found] = told(folder)
    assert found.passed
    assert "12 of 12 tokens identical" in found.detail
    assert "acceptance" in found.detail
    zoo.build(RUN).save_pretrained(tmp_path)
    [missing] = told(tmp_path)
    assert missing.passed
    assert "not there: mtp: no multi-token-prediction layer can be loaded" in missing.detail


def test_transformers_own_way_is_a_row_of_the_benchmark(folder: Path) -> None:
    model = LayerSkipModel.from_pretrained(folder, device="cpu", dtype="float32", engine="eager")
    prompts = [(str(i), zoo.prompt_of(6, seed=i)) for i in range(2)]
    result = run_benchmark(model, mtp(), prompts, Plan(12, 1, ("hf_mtp", "speculative", "mtp")))
    rows = {row["name"]: row for row in result.rows}
    assert rows["hf_mtp"]["identical"] == rows["speculative"]["identical"] == 2
    assert "see speculative" in rows["mtp"]["reason"]
    llama = run_benchmark(zoo.layerskip_of("llama"), None, prompts, Plan(4, 1, ("hf_mtp", "hf_generate")))
    assert "num_mtp_layers" in {row["name"]: row for row in llama.rows}["hf_mtp"]["reason"]


def refused(model: LayerSkipModel, weights: DraftWeights = ANY) -> str:
    with pytest.raises(ValueError, match=r"mtp|draft_weights") as error:
        model.check_config(mtp(weights))
    return str(error.value)


def test_what_cannot_draft_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "num_mtp_layers" in refused(zoo.layerskip_of("llama"))
    for modules in (False, True):
        assert "mtp needs the engine eager or fused, got cuda_graph" in refused(graph_model("llama", modules=modules))
    other = zoo.mtp_of(RUN).model_copy(update={"fingerprint": "0" * 16})
    assert f"must be that of the model's own layer, {zoo.mtp_of(RUN).fingerprint}, got 0000" in refused(
        zoo.layerskip_of(RUN), other
    )
    model = LayerSkipModel(zoo.build(RUN), engine="eager")
    assert "loaded from a checkpoint" in refused(model)
    monkeypatch.setattr(model.model.config, "_attn_implementation", "flash_attention_2")
    model.model.config.name_or_path = str(folder)
    assert "attention by sdpa or eager, got flash_attention_2" in refused(model)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    whole = load_file(broken / "model.safetensors")
    for left_out in ("model.layers.4.eh_proj.weight", "model.layers.4."):
        kept = {name: one for name, one in whole.items() if not name.startswith(left_out)}
        save_file(kept, broken / "model.safetensors", metadata={"format": "pt"})
        model = LayerSkipModel.from_pretrained(broken, device="cpu", dtype="float32", engine="eager")
        told = refused(model)
        assert f"no multi-token-prediction layer can be loaded from {broken}" in told
        assert "\n" not in told
        assert model.generate(PROMPT, max_new_tokens=6).ids == list(zoo.greedy_reference(RUN, PROMPT)[:6])


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"drafter": "mtp", "path": "./weights"}, "path: must be model where the drafter is mtp, got ./weights"),
        ({"drafter": "eagle", "path": "model"}, "path: must be a folder or a hub id where the drafter is eagle"),
        ({"drafter": "draft_model", "path": "x", "tree_tokens": 4}, "tree_tokens: must be left out"),
    ],
)
def test_weights_that_contradict_themselves_are_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        DraftWeights(fingerprint="0" * 16, **given)
