"""The demo model with a layer for drafts in its checkpoint: it says the same, and the layer is found and drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.huggingface.mtp import load_mtp
from studies.mtp import make_model
from studies.mtp.checkpoint import agreement, layer_loss, new_layer
from tests.layerskip import zoo


@pytest.mark.slow
def test_the_demo_model_with_a_layer_is_made_and_decoded(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert make_model.main(["--out", str(tmp_path), "--minutes", "0.03", "--depth", "2"]) == 0
    finally:
        torch.set_num_threads(threads)
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["steps"] >= 1
    assert len(facts["held_out_agreement"]) == 4
    model = LayerSkipModel.from_pretrained(tmp_path, device="cpu", dtype="float32", engine="eager")
    mask = SkipMask.none(model.num_layers)
    config = DecodeConfig(drafter="mtp", skip_mask=mask, gamma=3, draft_weights=model.mtp_weights())
    demo = LayerSkipModel.from_pretrained(make_model.DEMO, device="cpu", dtype="float32", looks_for_config=False)
    expected = demo.generate("def read(", max_new_tokens=16).ids
    assert model.generate("def read(", max_new_tokens=16, config=config).ids == expected


def test_a_trained_layer_is_right_more_often_than_one_that_begins() -> None:
    run = zoo.WITH_MTP[0]
    zoo.mtp_of(run)
    model, prompts = zoo.model_of(run), [zoo.prompt_of(6, seed=i) for i in range(4)]
    with torch.inference_mode(mode=False):
        texts = torch.tensor([[*one, *zoo.greedy_reference(run, one)] for one in prompts])
        begun, trained = new_layer(model), load_mtp(LayerSkipModel(model, engine="eager").adapter)
        assert 0.0 < layer_loss(model, trained, texts).item() < layer_loss(model, begun, texts).item()
        for right, before in zip(agreement(model, trained, texts, 2), agreement(model, begun, texts, 2), strict=True):
            assert before < right < 1.0
