"""Models whose own weights have 8 bits, as torchao stores them: rounding a model's, and reading them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerskip.config.decode_config import QuantizationName


@dataclass(frozen=True)
class Int8Weights:
    """Numbers and what one of them is worth in each output; activations are as they come."""

    numbers: torch.Tensor
    """(outputs, inputs), int8."""
    scales: torch.Tensor
    """(outputs,), float32."""


def quantize(model: nn.Module) -> None:
    """int8: round the weights of its linear modules, the output embedding among them, to 8 bits, with a scale for each
    output (torchao's `Int8WeightOnlyConfig`). Embeddings and a mixture's experts are no linear modules and stay whole.

    Raises: ValueError without torchao, or for a model that is quantised already.
    """
    if is_quantized(model):
        raise ValueError("quantization: int8 needs a model of whole weights, this one's are quantised already")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("quantization: needs the torchao library: pip install 'layerskip[quantized]'")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def is_quantized(model: nn.Module) -> bool:
    """Whether any of its weights are not plain floating-point numbers."""
    if getattr(model, "is_quantized", False):
        return True
    return any(not is_plain(one) for one in model.parameters())


def quantization_of(model: nn.Module) -> QuantizationName | None:
    """What `quantize` was asked for, after the model was loaded; None for one whose checkpoint is quantised, too."""
    if getattr(model, "is_quantized", False):
        return None
    return "int8" if any(int8_weights(one) is not None for one in model.parameters()) else None


def is_plain(weight: torch.Tensor) -> bool:
    """Whether these are floating-point numbers, as torch stores them."""
    return type(weight) in (torch.Tensor, nn.Parameter) and weight.is_floating_point() and weight.itemsize > 1


def int8_weights(weight: torch.Tensor) -> Int8Weights | None:
    """What torchao stores of weights of 8 bits with a scale for each output and no rule for activations; None for all
    others."""
    if type(weight).__name__ != "Int8Tensor" or weight.ndim != 2:
        return None
    own: Any = weight
    has_rule = any(getattr(own, one, None) is not None for one in ("act_quant_kwargs", "act_pre_scale"))
    is_centred = own.zero_point is None or not own.zero_point.any()
    if has_rule or not is_centred or own.scale.shape != (len(own.qdata), 1):
        return None
    return Int8Weights(own.qdata, own.scale.flatten().to(weight.dtype).float())  # torchao rounds them so in products


def stored_bytes(weight: torch.Tensor) -> int:
    """Of weights, however they are stored."""
    found = int8_weights(weight)
    return weight.nbytes if found is None else found.numbers.nbytes + found.scales.nbytes


def joined_int8(weights: Sequence[torch.Tensor], order: torch.Tensor | None = None) -> Int8Weights | None:
    """See `joined`; None where none of them has 8 bits. Raises: ValueError where some have and others have not."""
    if all(is_plain(one) for one in weights):
        return None
    found = [int8_weights(one) for one in weights]
    parts = [one for one in found if one is not None]
    if len(parts) < len(found):
        raise ValueError("weights in more than one format side by side")
    numbers, scales = torch.cat([one.numbers for one in parts]), torch.cat([one.scales for one in parts])
    return Int8Weights(numbers, scales) if order is None else Int8Weights(numbers[order], scales[order])
