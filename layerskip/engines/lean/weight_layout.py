"""TorchLayers: lean sublayers by torch's own operations, each matrix in the form that was fastest for its shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from layerskip.config.skip_mask import DraftBits
from layerskip.engines.lean.layers import LayerMaker
from layerskip.engines.lean.linear import DenseLinear, Linear, PackedLinear, joined, reordered
from layerskip.engines.recording.stopwatch import SecondsOf, Stopwatch
from layerskip.huggingface.quantization.products import GpuInt8Linear, int8_linear, int8_refusal
from layerskip.huggingface.quantization.weights import Int8Weights, joined_quantized

_FEW_ROWS = 5
"""A verification of four drafts. It counts half as much as products of one row, of which a round has more."""
_SMALLEST_BYTES = 1 << 17
"""Smaller matrices stay in a processor's own cache however they lie."""
_PASS_BYTES, _PASS_BYTES_ELSE = {"cuda": 1 << 28}, 1 << 26
"""Of the matrices that one timing goes through in turn, so that they come from where decoding finds them; but on a GPU
no more than the model's own. On a processor with a large cache a product from there took half the time, and the
form chosen by it made five rows 1.7 times one where the best makes them 1.4 times."""
_MOST_COPIES = 64
_MARGIN = {"cuda": 0.98}
"""A form must take less than this part of the time of the best one before it, else 0.9: a CPU's timings scatter by
tenths, and a choice that changes from process to process helps nobody."""

Layout = Literal["by inputs", "by outputs", "packed", "packed and padded", "packed, one row by inputs"]
"""From the first to the last, in the order in which one must be better than those before it. Only the last keeps a
second copy."""


class TorchLayers(LayerMaker):
    """See `LayerMaker`. Chooses between forms of a matrix: by inputs (inputs, outputs), by outputs as models have it,
    or packed.

    Which one a product with one row or a few reads faster depends on library, number format, shape and processor.

    Cost: about half a second for the first matrix of a shape, and for that time copies of it in each form, as many
    as 64 MiB hold (256 MiB on a GPU). Matrices of the same shape share the decision.
    """

    def __init__(
        self, device: torch.device, seconds_of: SecondsOf | None = None, *, model_bytes: int | None = None
    ) -> None:
        """model_bytes: of all matrices that one step reads; unknown without it, and taken to be many."""
        self._device = device
        self._pass_bytes = _PASS_BYTES.get(device.type, min(_PASS_BYTES_ELSE, model_bytes or _PASS_BYTES_ELSE))
        self._seconds_of = seconds_of or Stopwatch(device)
        self._chosen: dict[tuple[int, int], Layout] = {}

    def linear(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> Linear:
        """See `MakeLinear`: in the fastest form, a copy or two, or a view of a single weight; weights of 8 bits as a
        kernel for GPUs reads them."""
        if (own := joined_quantized(weights, order)) is not None:
            if not isinstance(own, Int8Weights):
                raise ValueError("weights of 4 bits need sublayers compiled for a CPU")
            elsewhere = "sublayers compiled for a CPU, or a CUDA device"
            if (lack := int8_refusal(self._device) if self._device.type == "cuda" else elsewhere) is not None:
                raise ValueError(f"weights of 8 bits need {lack}")
            return GpuInt8Linear(own, None if bias is None else reordered(bias, order))
        weight = joined(weights, order)
        bias = None if bias is None else reordered(bias, order)
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._chosen:
            self._chosen[shape] = self._fastest(weight) if weight.nbytes >= _SMALLEST_BYTES else "by inputs"
        return _made(self._chosen[shape], weight, bias)

    @property
    def description(self) -> str:
        """In a few words, with the shapes (outputs × inputs) where they are not all alike; none where all are by
        inputs."""
        common = Counter(self._chosen.values()).most_common(1)
        if not common or len(set(self._chosen.values())) == 1:
            return "" if not common or common[0][0] == "by inputs" else f"weights {common[0][0]}"
        parts = []
        for layout in get_args(Layout):
            named = [f"{outputs}×{inputs}" for (outputs, inputs), one in self._chosen.items() if one == layout]
            if named and layout != common[0][0]:
                parts.append(f"those of {', '.join(named)} {layout}")
        return "; ".join([f"weights {common[0][0]}", *parts])

    def rounded(self, bits: DraftBits) -> LayerMaker:
        assert bits == 8
        return _TorchLayersIn8Bits()

    def _fastest(self, weight: torch.Tensor) -> Layout:
        count = min(max(1, self._pass_bytes // weight.nbytes), _MOST_COPIES)
        weights = [weight, *(weight.clone() for _ in range(count - 1))]
        layouts: list[Layout] = ["by inputs", "by outputs"]
        if PackedLinear.serves(weight):
            layouts += ["packed", "packed and padded"]
        forms = [[_made(layout, one, None) for one in weights] for layout in layouts]
        seconds = self._seconds_of([_products(one, weight, rows) for one in forms for rows in (1, _FEW_ROWS)])
        taken = {layout: 2 * seconds[2 * i] + seconds[2 * i + 1] for i, layout in enumerate(layouts)}
        if "packed" in taken:
            taken["packed, one row by inputs"] = 2 * seconds[0] + min(seconds[5], seconds[7])
        margin = _MARGIN.get(self._device.type, 0.9)
        best: Layout = "by inputs"
        for layout in get_args(Layout):
            if layout in taken and taken[layout] < margin * taken[best]:
                best = layout
        return best


class _TorchLayersIn8Bits(LayerMaker):
    def linear(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> Linear:
        return int8_linear(joined(weights, order), None if bias is None else reordered(bias, order))

    def rounded(self, bits: DraftBits) -> LayerMaker:
        assert bits == 8
        return self


def _made(layout: Layout, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if layout == "by outputs":
        return DenseLinear(weight.t(), bias)
    if layout == "by inputs":
        return DenseLinear(weight.t().contiguous(), bias)
    one_row = DenseLinear(weight.t().contiguous(), bias) if layout == "packed, one row by inputs" else None
    return PackedLinear(weight, bias, pads=layout != "packed", one_row=one_row)


def _products(linears: Sequence[Linear], like: torch.Tensor, num_rows: int) -> Callable[[], None]:
    x = like.new_ones((num_rows, like.shape[1]))

    def multiply() -> None:
        for linear in linears:
            linear(x)

    return multiply
