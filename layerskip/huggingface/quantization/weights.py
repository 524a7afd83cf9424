"""Models whose own weights have 8 or 4 bits, as torchao stores them: rounding a model's, and reading them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import nn

from layerskip.config.decode_config import QuantizationName

GROUP = 32
"""Inputs whose weights of 4 bits share a scale and a zero."""
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Int8Weights:
    """Numbers and what one of them is worth in each output; activations are as they come."""

    numbers: torch.Tensor
    """(outputs, inputs), int8."""
    scales: torch.Tensor
    """(outputs,), float32."""


@dataclass(frozen=True)
class Int4Weights:
    """Numbers of which a weight is (number - zero) * scale; activations are as they come."""

    numbers: torch.Tensor
    """(outputs, inputs), uint8 below 16."""
    scales: torch.Tensor
    """(outputs, inputs / GROUP), in the model's number format."""
    zeros: torch.Tensor
    """The same shape, uint8."""


def quantize(model: nn.Module, name: QuantizationName) -> None:
    """Round the weights of its linear modules, the output embedding among them, as torchao does.

    int8: to 8 bits with a scale for each output (`Int8WeightOnlyConfig`). int4: to 4 bits with a scale and a zero for
    32 inputs of each output (`IntxWeightOnlyConfig`); the output embedding, and modules whose inputs are no multiple of
    32, to 8 bits. Embeddings and a mixture's experts are no linear modules and stay whole.

    Raises: ValueError without torchao, or for a model that is quantised already.
    """
    if is_quantized(model):
        raise ValueError(f"quantization: {name} needs a model of whole weights, this one's are quantised already")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("quantization: needs the torchao library: pip install 'layerskip[quantized]'")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    from torchao.quantization.quant_primitives import MappingType

    if name == "int4":
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        by_group = IntxWeightOnlyConfig(_INT4, PerGroup(GROUP), MappingType.ASYMMETRIC)
        quantize_(model, by_group, lambda one, _name: _has_groups(one) and one is not head)
    quantize_(model, Int8WeightOnlyConfig(), lambda one, _name: isinstance(one, nn.Linear) and is_plain(one.weight))


def _has_groups(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % GROUP == 0


def is_quantized(model: nn.Module) -> bool:
    """Whether any of its weights are not plain floating-point numbers."""
    if getattr(model, "is_quantized", False):
        return True
    return any(not is_plain(one) for one in model.parameters())


def quantization_of(model: nn.Module) -> QuantizationName | None:
    """What `quantize` was asked for, after the model was loaded; None for one whose checkpoint is quantised, too."""
    if getattr(model, "is_quantized", False):
        return None
    names = {quantization_of_weight(one) for one in model.parameters()}
    return "int4" if "int4" in names else "int8" if "int8" in names else None


def is_plain(weight: torch.Tensor) -> bool:
    """Whether these are floating-point numbers, as torch stores them."""
    return type(weight) in (torch.Tensor, nn.Parameter) and weight.is_floating_point() and weight.itemsize > 1


def quantization_of_weight(weight: torch.Tensor) -> QuantizationName | None:
    """int8 for what torchao stores of weights of 8 bits with a scale for each output, int4 for those of 4 bits with
    scales for groups whose sizes are multiples of `GROUP`; None for all others, and where there is a rule for
    activations."""
    own: Any = weight
    kind = type(weight).__name__ if weight.ndim == 2 else None
    if kind == "Int8Tensor":
        has_rule = any(getattr(own, one, None) is not None for one in ("act_quant_kwargs", "act_pre_scale"))
        is_centred = own.zero_point is None or not own.zero_point.any()
        return "int8" if is_centred and not has_rule and own.scale.shape == (len(own.qdata), 1) else None
    if kind == "IntxUnpackedToInt8Tensor" and own.target_dtype == _INT4 and own.block_size[1] % GROUP == 0:
        return None if own.activation_quantization else "int4"
    return None


def quantized_weights(weight: torch.Tensor) -> Int8Weights | Int4Weights | None:
    """See `quantization_of_weight`. Cost: of int4 a copy, a byte for every weight."""
    name, own = quantization_of_weight(weight), cast(Any, weight)
    if name == "int8":
        scales = own.scale.flatten().to(weight.dtype)  # torchao rounds them so in products
        return Int8Weights(own.qdata, scales.float())
    if name == "int4":
        times = own.block_size[1] // GROUP
        scales, zeros = (one.repeat_interleave(times, dim=1) for one in (own.scale, own.zero_point))
        return Int4Weights((own.qdata + 8).to(torch.uint8), scales.to(weight.dtype), (zeros + 8).to(torch.uint8))
    return None


def stored_bytes(weight: torch.Tensor) -> int:
    """Of weights as a step reads them."""
    name = quantization_of_weight(weight)
    if name == "int8":
        return weight.numel() + len(weight) * torch.float32.itemsize
    if name == "int4":
        return weight.numel() // 2 + weight.numel() // GROUP * (weight.dtype.itemsize + 1)
    return weight.nbytes


def joined_quantized(
    weights: Sequence[torch.Tensor], order: torch.Tensor | None = None
) -> Int8Weights | Int4Weights | None:
    """See `joined`; None where they are whole. Raises: ValueError where they are in more than one format."""
    if all(is_plain(one) for one in weights):
        return None
    found = [quantized_weights(one) for one in weights]
    first = found[0]
    if first is None or any(type(one) is not type(first) for one in found):
        raise ValueError("weights in more than one format side by side")
    parts = [torch.cat([getattr(one, field.name) for one in found]) for field in fields(first)]
    return type(first)(*(parts if order is None else [one[order] for one in parts]))
