"""NativeLinear: a matrix as the kernels read it; and how rows and norms are handed to them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUTanh

from layerskip.config.skip_mask import DraftBits
from layerskip.engines.lean.layers import FinishedLinear, Norm
from layerskip.engines.lean.linear import Linear, joined, reordered
from layerskip.engines.native import library
from layerskip.engines.native.huge_pages import HugePages
from layerskip.huggingface.quantization.products import rounded_groups, rounded_weights
from layerskip.huggingface.quantization.weights import GROUP, Int4Weights, is_plain, joined_quantized, stored_bytes

_QUAD = 4
_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT8, _INT8_BY_FLOATS, _INT4, _INT4_BY_FLOATS = range(2, 6)
_HALF_BY_FLOATS = {torch.bfloat16: 6, torch.float16: 7}
_ROWS_AT_ONCE, _LOOKED_AT = 4096, 64


@dataclass(frozen=True, eq=False)
class NativeLinear:
    """A matrix as the kernels read it: packed in blocks, or in place, as the model has it."""

    kernels: ctypes.CDLL
    num_outputs: int
    num_inputs: int
    kind: int
    """How they are stored and multiplied, see `Kind` in kernels.cpp."""
    weights: tuple[torch.Tensor, ...]
    """Packed, one (blocks, inputs / n, outputs of a block, n): n inputs lie together: of 8 bits 4 or 2, of
    bfloat16 2 or 1, as many as this CPU multiplies at once; of those 4 each weight is 128 too large, as unsigned
    numbers. Those that are multiplied as floats lie one by one. Of 4 bits (blocks, inputs / 32, bytes of a
    `Group` in kernels.cpp)."""
    rows: torch.Tensor | None
    """In place, (outputs,), int64: the addresses of their weights."""
    scales: torch.Tensor | None
    """(outputs,) of 8-bit weights."""
    bias: torch.Tensor | None
    """(outputs,), float32."""

    @classmethod
    def of(
        cls,
        kernels: ctypes.CDLL,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        order: torch.Tensor | None = None,
        *,
        bits: DraftBits | None = None,
        in_place: bool = False,
    ) -> NativeLinear:
        """See `MakeLinear`. bits: rounded to 8 with a scale for each output, or to 4 with a scale and a zero for groups
        of inputs (to 8 where these do not fill groups), and packed, with activations rounded to 16 bits. Weights that
        have 8 or 4 bits already are packed; of a float32 model activations then stay whole. So do they of float32
        weights that are packed in the 16 bits of their checkpoint: the same products, of half the bytes.

        Cost: a copy of the weights, unless they are read in place. Raises: ValueError for another number format.
        """
        if (kind := _KINDS.get(weights[0].dtype)) is None:
            raise ValueError(f"weights of {str(weights[0].dtype).removeprefix('torch.')}")
        bias = None if bias is None else reordered(bias.detach(), order).float()
        own = joined_quantized(weights, order)
        is_float32 = weights[0].dtype == torch.float32
        if own is None and bits == 4 and weights[0].shape[1] % GROUP == 0:
            own = rounded_groups(joined(weights, order).detach())
        if isinstance(own, Int4Weights):
            packed = _groups(own, kernels.layerskip_outputs_together())
            kind = _INT4_BY_FLOATS if is_float32 and bits is None else _INT4
            outputs, inputs = own.numbers.shape
            return cls(kernels, outputs, inputs, kind, (packed,), None, None, bias)
        is_whole = own is None and bits is None
        if in_place and is_whole:
            held = [one if one.stride(1) == 1 else one.contiguous() for one in (one.detach() for one in weights)]
            places = [one.data_ptr() + torch.arange(len(one)) * (one.stride(0) * one.itemsize) for one in held]
            rows = reordered(torch.cat(places), order)
            return cls(kernels, len(rows), held[0].shape[1], kind, tuple(held), rows, None, bias)
        if is_whole:
            weight, scales = joined(weights, order).detach(), None
            if is_float32 and (half := half_of(weight)) is not None:
                weight, kind = weight.to(half), _HALF_BY_FLOATS[half]
        else:
            kind = _INT8 if bits is not None or not is_float32 else _INT8_BY_FLOATS
            own = own or rounded_weights(joined(weights, order).detach())
            weight, scales = own.numbers, own.scales
        num_outputs, num_inputs = weight.shape
        block, together = kernels.layerskip_outputs_together(), kernels.layerskip_inputs_together(kind)
        weight = F.pad(weight, (0, -num_inputs % together, 0, -num_outputs % block))
        packed = weight.view(-1, block, weight.shape[1] // together, together).transpose(1, 2).contiguous()
        if together == _QUAD:
            packed.view(torch.uint8).bitwise_xor_(128)  # the processor's instruction multiplies unsigned ones
        return cls(kernels, num_outputs, num_inputs, kind, (packed,), None, scales, bias)

    @cached_property
    def matrix(self) -> library.Matrix:
        """For the kernels."""
        own = self.weights[0]
        tensors = (own if self.rows is None else None, self.rows, self.scales, self.bias)
        places = [None if one is None else one.data_ptr() for one in tensors]
        return library.Matrix(*places, self.num_outputs, self.num_inputs, self.kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, residual)

    def kept_in(self, memory: HugePages) -> NativeLinear:
        """Its packed weights moved there; itself where they are read in place."""
        return self if self.rows is not None else replace(self, weights=tuple(map(memory.copy, self.weights)))

    def first(self, count: int) -> NativeLinear:
        """Of the first so many outputs, in the same memory."""
        return replace(self, num_outputs=count)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), self.num_outputs)
        self.kernels.layerskip_linear(ctypes.byref(self.matrix), ctypes.byref(rows_of(x, residual, out)))
        return out


@dataclass(frozen=True, eq=False)
class NativeEnding:
    """The product that ends a sublayer, and what is done to it before the residual is added."""

    linear: NativeLinear
    norm: tuple[torch.Tensor | None, float]
    scale: float
    total: float

    @classmethod
    def of(cls, out: Linear) -> NativeEnding:
        """Of one that `NativeLayers` made."""
        finished = out if isinstance(out, FinishedLinear) else FinishedLinear(out, None, 1.0)
        assert isinstance(finished.linear, NativeLinear)
        return cls(finished.linear, norm_weight(finished.norm), finished.scale, finished.total)

    @cached_property
    def part(self) -> library.Ending:
        """For the kernels."""
        return library.Ending(self.linear.matrix, norm_part(*self.norm), self.scale, self.total)


def half_of(weight: torch.Tensor) -> torch.dtype | None:
    """The number format of 16 bits that has all of these float32 numbers (outputs, inputs), as they were published."""
    pieces = [weight[i : i + _ROWS_AT_ONCE] for i in range(0, len(weight), _ROWS_AT_ONCE)]
    formats = (one for one in _HALF_BY_FLOATS if all(torch.equal(piece.to(one).float(), piece) for piece in pieces))
    return next(formats, None)


def packed_bytes(weight: torch.Tensor) -> int:
    """Of such a weight as kernels read it; of float32 ones by a look at the first outputs."""
    is_float32 = weight.ndim == 2 and is_plain(weight) and weight.dtype == torch.float32
    return stored_bytes(weight) // (2 if is_float32 and half_of(weight[:_LOOKED_AT]) is not None else 1)


def _groups(own: Int4Weights, block: int) -> torch.Tensor:
    """As `Group` in kernels.cpp has them."""
    padding = -len(own.numbers) % block
    numbers, scales, zeros = (F.pad(one, (0, 0, 0, padding)) for one in (own.numbers, own.scales, own.zeros))
    # Of eight inputs the first of each two are the lower 16 bits, a byte for two of them, the others the upper ones.
    eights = numbers.view(-1, block, numbers.shape[1] // GROUP, GROUP // 8, 2, 2, 2).movedim(-1, -3)
    pairs = (eights[..., 0] | eights[..., 1] << 4).permute(0, 2, 3, 1, 4, 5)
    parts = [pairs, *(one.view(-1, block, one.shape[1]).transpose(1, 2) for one in (scales, zeros))]
    return torch.cat([one.contiguous().view(torch.uint8).flatten(2) for one in parts], dim=2)


def norm_weight(norm: Any) -> tuple[torch.Tensor | None, float]:
    """Weights in float32, kept as long as the kernels may read them, and epsilon; without weights nothing is normed."""
    if norm is None or isinstance(norm, nn.Identity):
        return None, 0.0
    assert isinstance(norm, Norm), f"no kernel for {type(norm).__name__}"
    return norm.weight.float().contiguous(), norm.eps


def norm_part(weight: torch.Tensor | None, eps: float) -> library.Norm:
    return library.Norm(None if weight is None else weight.data_ptr(), eps)


def rows_of(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> library.Rows:
    """The caller keeps the tensors until the kernel is done."""
    return library.Rows(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        None,
        0,
        len(x),
        int(x.dtype == torch.float32),
        torch.get_num_threads(),
    )


_ACTIVATIONS: tuple[Callable[[Any], bool], ...] = (
    lambda one: one is F.silu,
    lambda one: isinstance(one, GELUTanh),
)
"""By the number that the kernels know them by."""


def activation_number(activation: Any) -> int | None:
    """None where the kernels have none."""
    return next((i for i, is_it in enumerate(_ACTIVATIONS) if is_it(activation)), None)
