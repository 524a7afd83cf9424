"""Models that see pictures too, decoding text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, custom_generate
from tests.layerskip import zoo

_TEXT: dict[str, Any] = {**zoo.SPECS["llama"].arguments, "head_dim": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_GRIDS = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
_EYE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYE |= {"image_size": 28, "patch_size": 14}
_QWEN_EYE = {**_EYE, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "embed_dim": 16}
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", "head_dim": 8}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 16}),
    "smolvlm": ({"model_type": "llama"}, {}),
    "qwen2_vl": (_GRIDS, _QWEN_EYE),
    "qwen2_5_vl": (_GRIDS, _QWEN_EYE),
    "qwen3_vl": (_GRIDS, {**_QWEN_EYE, "deepstack_visual_indexes": [0]}),
    "gemma3": (zoo.SPECS["gemma3"].arguments, {"model_type": "siglip_vision_model"}),
    "glm4v": (_GRIDS, _QWEN_EYE),
}
"""What is told of the text's and the pictures' part of each."""
_VARIED = tuple(name for name in _MODELS if name != "gemma3")
"""Whose greedy text is; Gemma 3 is compared in test_engines.py."""


def made(name: str) -> Any:
    text, eye = _MODELS[name]
    config = transformers.AutoConfig.for_model(name, text_config=_TEXT | text, vision_config=_EYE | eye, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        for parameter in model.model.get_decoder().parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "eager") for name in _VARIED), *((name, "fused") for name in _VARIED if name != "glm4v")],
)
def test_text_is_decoded_as_the_model_alone_decodes_it(name: str, engine: str, tmp_path: Path) -> None:
    """Loaded from a folder, drafted with layers left out and with 8-bit weights."""
    made(name).save_pretrained(tmp_path)
    model = LayerSkipModel.from_pretrained(tmp_path, engine=engine)
    prompt = zoo.prompt_of(9)
    expected = model.model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, len(prompt) :]
    assert len(set(expected.tolist())) > 3
    for mask in ("4:2", "4:int8"):
        output = model.generate(prompt, max_new_tokens=30, config=DecodeConfig(skip_mask=SkipMask.parse(mask), gamma=3))
        assert output.ids == expected.tolist()
        assert output.stats.num_drafted > output.stats.num_rounds
        assert output.stats.num_accepted > 0


@zoo.each(list(_MODELS))
def test_they_take_it_as_a_custom_generate(name: str) -> None:
    """For text; with what a processor says of every token, that it is none of a picture."""
    model, prompt = made(name), torch.tensor([zoo.prompt_of(9)])
    fast = custom_generate(DecodeConfig(skip_mask=SkipMask.parse("4:2"), gamma=3))
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)
    told = {"mm_token_type_ids": torch.zeros_like(prompt)} if name.startswith("qwen") else {}
    for inputs in ({}, told):
        assert torch.equal(model.generate(prompt, max_new_tokens=12, custom_generate=fast, **inputs), expected)


def test_pictures_are_refused_by_name() -> None:
    model = made("llava")
    fast = custom_generate(DecodeConfig(skip_mask=SkipMask.parse("4:2"), gamma=3))
    pictures = {"pixel_values": torch.zeros(1, 3, 28, 28)}
    with pytest.raises(ValueError, match="pictures are not decoded here"):
        model.generate(torch.tensor([zoo.prompt_of(9)]), max_new_tokens=3, custom_generate=fast, **pictures)
