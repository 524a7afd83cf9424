"""TorchLayers: lean sublayers by torch's own operations; and which way of computing sublayers a device has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.engines.lean_layers import LayerMaker
from layerskip.engines.linear import Linear, joined
from layerskip.engines.native.layers import NativeLayers
from layerskip.engines.weight_layout import WeightLayouts
from layerskip.huggingface.int8 import Int8Linear


class TorchLayers(LayerMaker):
    """See `LayerMaker`. Each matrix is kept in the form that products of one row and of a few read faster here."""

    def __init__(self, device: torch.device, *, model_bytes: int | None = None) -> None:
        """model_bytes: see `WeightLayouts`."""
        self._layouts = WeightLayouts(device, model_bytes=model_bytes)

    @property
    def description(self) -> str:
        return self._layouts.description

    def linear(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Linear:
        return self._layouts.linear(weights, bias)

    def in_8_bits(self) -> LayerMaker:
        return _TorchLayersIn8Bits()


class _TorchLayersIn8Bits(LayerMaker):
    def linear(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Linear:
        return Int8Linear(joined(weights), bias)

    def in_8_bits(self) -> LayerMaker:
        return self


def draft_layers(device: torch.device, dtype: torch.dtype) -> LayerMaker:
    """Of layers that only draft: in 8 bits and compiled for this CPU where that can be, else torch's.

    They read a quarter of float32's weights, half of bfloat16's, and hardly a draft changes (`python -m
    studies.engine.draft_bits`).
    """
    return NativeLayers().in_8_bits() if NativeLayers.refusal(device, dtype) is None else TorchLayers(device)
