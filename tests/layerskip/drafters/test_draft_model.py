"""DraftModelDrafter, and what makes a folder a draft model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.chain import WeightsSettings
from layerskip.drafters.draft_model import DraftModelDrafter
from layerskip.drafters.draft_weights import describe_weights, loaded_weights
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo

NONE = SkipMask.none(zoo.NUM_LAYERS)
WORDS = [f"w{i}" for i in range(zoo.VOCAB)]


def config_of(weights: DraftWeights, **fields: Any) -> DecodeConfig:
    return DecodeConfig(**{"drafter": "draft_model", "skip_mask": NONE, "gamma": 4, "draft_weights": weights} | fields)


def small(folder: Path, vocab_size: int = zoo.VOCAB, **fields: Any) -> DraftWeights:
    """A model of one layer, in a folder."""
    with torch.inference_mode(mode=False):
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            **fields,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return describe_weights(folder)


def test_it_computes_what_it_would_from_scratch() -> None:
    model = zoo.layerskip_of("llama fused")
    weights = zoo.draft_model_of("llama")
    model.check_config(config_of(weights))
    draft: Any = loaded_weights(model.engine, weights)
    drafter = DraftModelDrafter(draft, Sampler(SamplingParams()), WeightsSettings(3))
    context = list(zoo.prompt_of(6))
    with torch.inference_mode(), drafter.session(64):
        session = drafter.begin()
        # All right and the target's own; the second wrong; none for a while; forgotten.
        for kept, more, back in ((3, 1, None), (1, 1, None), (0, 4, None), (2, 1, 3)):
            if back is not None:
                session.forget_from(back)
            found = session.propose(context, 8, None)
            told, expected = found.ids.tolist(), list(context)
            for _ in range(3):
                expected.append(zoo_greedy(weights, expected))
            assert told == expected[len(context) :]
            wrong = [(told[kept] + 1) % zoo.VOCAB] if kept < 3 else []
            context += told[:kept] + wrong + list(zoo.prompt_of(more, seed=kept))[: more - len(wrong)]


def zoo_greedy(weights: DraftWeights, ids: list[int]) -> int:
    model = LlamaForCausalLM.from_pretrained(weights.path)
    return int(model(torch.tensor([ids])).logits[0, -1].argmax())


@pytest.mark.parametrize("rows", [zoo.VOCAB - 8, zoo.VOCAB, zoo.VOCAB + 8])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_output_is_the_targets_whatever_rows_the_draft_has(tmp_path: Path, rows: int, sampled: bool) -> None:
    """As Qwen2.5 models have them, whose embeddings are padded to different numbers of rows."""
    model = LayerSkipModel(zoo.model_of("llama"), engine="fused")
    model.tokenizer = zoo.tokenizer_of(WORDS[:-8])
    weights = small(tmp_path / "draft", rows)
    model.tokenizer.save_pretrained(tmp_path / "draft")
    weights = describe_weights(tmp_path / "draft")
    more: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 3} if sampled else {}
    prompt = [*zoo.prompt_of(5), zoo.VOCAB - 1]
    plain = model.generate(prompt, max_new_tokens=24, config=DecodeConfig.plain(zoo.NUM_LAYERS), **more)
    out = model.generate(prompt, max_new_tokens=24, config=config_of(weights), **more)
    assert out.ids == plain.ids
    assert out.stats.num_drafted


def test_a_text_beyond_its_positions_is_not_drafted(tmp_path: Path) -> None:
    model = LayerSkipModel(zoo.model_of("llama"), engine="fused")
    weights = small(tmp_path / "draft", max_position_embeddings=12)
    plain = model.generate(zoo.prompt_of(6), max_new_tokens=20, config=DecodeConfig.plain(zoo.NUM_LAYERS))
    out = model.generate(zoo.prompt_of(6), max_new_tokens=20, config=config_of(weights))
    assert out.ids == plain.ids
    assert 0 < out.stats.num_drafted <= 4 * 7
    assert out.stats.num_target_only


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = LayerSkipModel(zoo.model_of("llama"), engine="fused")
    weights = small(tmp_path / "draft")
    with pytest.raises(
        ValueError, match=r"draft_weights.fingerprint: must be that of .*draft_model .* got draft_model 0"
    ):
        model.check_config(config_of(weights.model_copy(update={"fingerprint": "0"})))
    with pytest.raises(ValueError, match=r"draft_weights.drafter: must be the drafter, draft_model, got eagle"):
        config_of(weights.model_copy(update={"drafter": "eagle"}))
    other = small(tmp_path / "larger", zoo.VOCAB + 1)
    with pytest.raises(ValueError, match=f"must know as many tokens as the model, {zoo.VOCAB}, got {zoo.VOCAB + 1}"):
        model.check_config(config_of(other))
    model.tokenizer = zoo.tokenizer_of(WORDS)
    zoo.tokenizer_of(["new", *WORDS[1:]]).save_pretrained(tmp_path / "draft")
    other_tokens = config_of(describe_weights(tmp_path / "draft").narrowed(8))
    with pytest.raises(ValueError, match=r"draft_vocab: must be left out where the draft model has another tokenizer"):
        model.check_config(other_tokens)
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(tmp_path / "larger" / "config.json", empty)
    with pytest.raises(ValueError, match=r"has a model's config.json, and no weights"):
        describe_weights(empty)


def test_one_of_the_hub_is_loaded_from_the_cache_and_named_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = small(tmp_path / "cached")
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        if name != "org/draft":
            raise LocalEntryNotFoundError("offline")
        return str(tmp_path / "cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    weights = describe_weights("org/draft")
    assert (weights.path, weights.fingerprint) == ("org/draft", local.fingerprint)
    config = config_of(weights)
    config.save(tmp_path / "config.json")
    assert DecodeConfig.load(tmp_path / "config.json") == config
    model = LayerSkipModel(zoo.model_of("llama"), engine="fused")
    prompt = zoo.prompt_of(5)
    plain = model.generate(prompt, max_new_tokens=8, config=DecodeConfig.plain(zoo.NUM_LAYERS))
    assert model.generate(prompt, max_new_tokens=8, config=config).ids == plain.ids
    assert set(asked) == {"org/draft"}
    with pytest.raises(OSError, match="org/nothing: no such folder; as a hub id it is not in the cache"):
        describe_weights("org/nothing")


def test_the_fingerprint_is_that_of_the_weights(tmp_path: Path) -> None:
    first = small(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert describe_weights(tmp_path / "b").fingerprint == first.fingerprint
    file = tmp_path / "b" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert describe_weights(tmp_path / "b").fingerprint != first.fingerprint
    assert json.loads(config_of(first).model_dump_json())["draft_weights"]["drafter"] == "draft_model"
