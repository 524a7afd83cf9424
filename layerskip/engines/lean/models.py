"""Which models lean layers serve, and what is beside their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerskip.engines.lean.layers import first_of
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from layerskip.huggingface.memory import lack_of_room
from layerskip.huggingface.quantization.weights import is_plain, quantization_of_weight, stored_bytes

_DECODERS = (
    *("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SmolLM3Model", "GraniteModel"),
    *("Gemma3TextModel", "Qwen2VLTextModel", "Qwen2_5_VLTextModel", "Qwen3VLTextModel"),
)
"""Classes of decoders, alone or in a model that sees pictures too."""
COMPILED_DECODERS = (
    *("Qwen3_5TextModel", "Lfm2Model", "GraniteMoeHybridModel", "BambaModel", "Gemma4TextModel", "MixtralModel"),
    *("Qwen2MoeModel", "Qwen3MoeModel", "Qwen3_5MoeTextModel", "Glm4MoeModel", "Lfm2MoeModel"),
)
"""Served by sublayers compiled for a CPU alone: torch's operations are not written here."""


def rotary_of(decoder: Any) -> Any:
    return first_of(decoder, "rotary_emb", "pos_emb")


def embedding_scale(decoder: Any) -> float:
    """What rows of the embedding are multiplied with, in the model's number format."""
    embedding = decoder.embed_tokens
    scale = getattr(embedding, "scalar_embed_scale", getattr(decoder, "embedding_multiplier", 1.0))
    return float(torch.tensor(scale, dtype=embedding.weight.dtype))


def weight_bytes(adapter: ModelAdapter, bytes_of: Callable[[torch.Tensor], int] = stored_bytes) -> int:
    """Of what a second copy is made of, each matrix counted so: experts are read in place."""
    own = [*(one for one in adapter.matrices if one.ndim == 2), adapter.head.weight]
    return sum(bytes_of(one) for one in own)


def check_supported(adapter: ModelAdapter, refusal: str | None) -> None:
    """refusal: why sublayers are not compiled for this CPU, None if they are.

    Raises: UnsupportedModelError for a decoder of another class or with weights that are not plain, for one on several
    devices or offloaded, and by torch where a copy would take more than half of the free memory.
    """
    adapter.placement.check_whole("fused")
    name = type(adapter.decoder).__name__
    if name not in (*_DECODERS, *COMPILED_DECODERS):
        supported = ", ".join((*_DECODERS, *COMPILED_DECODERS))
        raise UnsupportedModelError(f"engine fused: supports {supported}, got {name}")
    if name in COMPILED_DECODERS and refusal is not None:
        detail = f": {refusal}" if refusal else ""
        raise UnsupportedModelError(f"engine fused: {name} needs sublayers compiled for a CPU{detail}")
    rope_types = getattr(rotary_of(adapter.decoder), "rope_type", "default")
    for rope_type in rope_types.values() if isinstance(rope_types, dict) else [rope_types]:
        if rope_type not in ("default", "linear", "llama3", "yarn", "proportional"):
            raise UnsupportedModelError(
                f"engine fused: positions of rope type {rope_type!r} change with the text's length"
            )
    for layer in adapter.layers:
        for module in layer.modules():
            if not isinstance(module, nn.Linear):
                continue
            has_read = is_plain(module.weight) or quantization_of_weight(module.weight) is not None
            if type(module) is not nn.Linear or not has_read:
                kind = type(module.weight if type(module) is nn.Linear else module).__name__
                raise UnsupportedModelError(
                    "engine fused: weights must be plain, of 8 bits with a scale for each output or of 4 with one for "
                    f"32 inputs, got {kind}"
                )
    if refusal is not None and (lack := lack_of_room(weight_bytes(adapter), adapter.device)):
        raise UnsupportedModelError(f"engine fused: needs a second copy of the weights ({lack})")
