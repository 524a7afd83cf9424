"""Decoder sublayers by kernels compiled for this CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from layerskip.engines.lean_layers import Attention, LayerMaker, Mlp, Norm
from layerskip.engines.linear import Linear, joined
from layerskip.engines.native import library

_MOST_HEAD_DIM = 1024
_QUAD = 4
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class NativeLayers(LayerMaker):
    """See `LayerMaker`. A row's numbers do not depend on how many rows it is computed with.

    Cost: a second copy of the weights. Raises: ValueError where there are no kernels.
    """

    def __init__(self, *, int8: bool = False) -> None:
        found = library.load_kernels()
        if isinstance(found, str):
            raise ValueError(f"kernels: {found}")
        self.kernels, self._int8 = found, int8

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
        """Why there are none for a model on this device in this number format; None where there are."""
        if device.type != "cpu":
            return f"not for {device.type}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"not for {str(dtype).removeprefix('torch.')}"
        found = library.load_kernels()
        return found if isinstance(found, str) else None

    @property
    def description(self) -> str:
        return "sublayers compiled for this CPU"

    def linear(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Linear:
        return NativeLinear.of(self.kernels, weights, bias, int8=self._int8)

    def in_8_bits(self) -> LayerMaker:
        return NativeLayers(int8=True)

    def attention(self, layer: Any, window: int | None) -> Attention:
        part = super().attention(layer, window)
        return part if part.head_dim > _MOST_HEAD_DIM else NativeAttention(**vars(part))

    def mlp(self, layer: Any) -> Mlp:
        part = super().mlp(layer)
        return NativeMlp(**vars(part)) if part.activation is F.silu else part


@dataclass(frozen=True, eq=False)
class NativeLinear:
    """A matrix in the blocks that the kernels read."""

    kernels: ctypes.CDLL
    num_outputs: int
    num_inputs: int
    packed: torch.Tensor
    """(blocks, inputs / n, outputs of a block, n): n inputs lie together, 1, or 2 of bfloat16, or 4 of 8 bits, where
    this CPU multiplies so many at once; of those 4 each weight is 128 too large, as unsigned numbers."""
    scales: torch.Tensor | None
    """(outputs,) of 8-bit weights."""
    bias: torch.Tensor | None
    """(outputs,), float32."""

    @classmethod
    def of(
        cls, kernels: ctypes.CDLL, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, *, int8: bool
    ) -> NativeLinear:
        """int8: the weights rounded to 8 bits with a scale for each output."""
        weight, scales = joined(weights).detach(), None
        if int8:
            whole = weight.float()
            scales = whole.abs().amax(dim=1).clamp_min(1e-8) / 127
            weight = (whole / scales[:, None]).round_().to(torch.int8)
        num_outputs, num_inputs = weight.shape
        block, together = kernels.layerskip_outputs_together(), kernels.layerskip_inputs_together(_KINDS[weight.dtype])
        weight = F.pad(weight, (0, -num_inputs % together, 0, -num_outputs % block))
        packed = weight.view(-1, block, weight.shape[1] // together, together).transpose(1, 2).contiguous()
        if together == _QUAD:
            packed.view(torch.uint8).bitwise_xor_(128)  # the processor's instruction multiplies unsigned ones
        bias = None if bias is None else bias.detach().float()
        return cls(kernels, num_outputs, num_inputs, packed, scales, bias)

    @cached_property
    def matrix(self) -> library.Matrix:
        """For the kernels."""
        kind = _KINDS[self.packed.dtype]
        places = [None if one is None else one.data_ptr() for one in (self.packed, self.scales, self.bias)]
        return library.Matrix(*places, self.num_outputs, self.num_inputs, kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, residual)

    def first(self, count: int) -> NativeLinear:
        """Of the first so many outputs, in the same memory."""
        bias = None if self.bias is None else self.bias[:count]
        return NativeLinear(self.kernels, count, self.num_inputs, self.packed, self.scales, bias)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), self.num_outputs)
        self.kernels.layerskip_linear(ctypes.byref(self.matrix), ctypes.byref(_rows(x, residual, out)))
        return out


class NativeAttention(Attention):
    """See `Attention`."""

    causal_after_context: ClassVar[bool] = True

    def look(self, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        return visible.contiguous()

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        states: torch.Tensor,
        place: int,
        look: tuple[int, torch.Tensor | None, bool],
    ) -> torch.Tensor:
        out = torch.empty_like(residual, memory_format=torch.contiguous_format)
        seen = _look(rotary, states, place, look)
        rows = _rows(x, residual, out)
        self._qkv.kernels.layerskip_attention(ctypes.byref(self.part), ctypes.byref(rows), ctypes.byref(seen))
        return out

    @property
    def _qkv(self) -> NativeLinear:
        assert isinstance(self.qkv, NativeLinear)
        return self.qkv

    @cached_property
    def _norms(self) -> list[tuple[torch.Tensor | None, float]]:
        return [_norm(one) for one in (self.norm, self.query_norm, self.key_norm)]

    @cached_property
    def part(self) -> library.AttentionPart:
        """For the kernels."""
        assert isinstance(self.out, NativeLinear)
        norms = [_norm_part(*one) for one in self._norms]
        sizes = (self.num_queries, self.num_keys, self.head_dim, self.scaling)
        return library.AttentionPart(*norms, self._qkv.matrix, self.out.matrix, *sizes)


class NativeMlp(Mlp):
    """See `Mlp`."""

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.gate_up, NativeLinear)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = _rows(x, x, out)
        self.gate_up.kernels.layerskip_mlp(ctypes.byref(self.part), ctypes.byref(rows))
        return out

    @cached_property
    def _norm_weight(self) -> tuple[torch.Tensor | None, float]:
        return _norm(self.norm)

    @cached_property
    def part(self) -> library.MlpPart:
        """For the kernels."""
        assert isinstance(self.gate_up, NativeLinear)
        assert isinstance(self.down, NativeLinear)
        return library.MlpPart(_norm_part(*self._norm_weight), self.gate_up.matrix, self.down.matrix)


class NativeRun:
    """Some layers one after another, in one call: without it a step of 30 layers spends half a millisecond between
    them. Cost: 2 microseconds a layer to make."""

    def __init__(self, layers: Sequence[tuple[Attention | None, Mlp | None]]) -> None:
        """All made by `NativeLayers`, or None: skipped."""
        self._kernels = NativeLayers().kernels
        by_window = {one.window: one for one, _ in layers if one is not None}
        self.looking = list(by_window.values())
        """An attention of every window."""
        windows = list(by_window)
        self._layers = (library.Layer * len(layers))()
        for layer, (attention, mlp) in zip(self._layers, layers, strict=True):
            if attention is not None:
                assert isinstance(attention, NativeAttention)
                layer.attention, layer.look = ctypes.pointer(attention.part), windows.index(attention.window)
            if mlp is not None:
                assert isinstance(mlp, NativeMlp)
                layer.mlp = ctypes.pointer(mlp.part)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        states: Sequence[torch.Tensor],
        place: int,
        looks: Sequence[tuple[int, torch.Tensor | None, bool]],
    ) -> torch.Tensor:
        """x (T, hidden) after these layers. states: of every one, looks: of those `looking`, see `Attention.add_to`."""
        out = x.clone(memory_format=torch.contiguous_format)
        seen = (library.Look * len(looks))(*(_look(rotary, states[0], place, look) for look in looks))
        places = (ctypes.c_void_p * len(states))(*(one.data_ptr() for one in states))
        rows = ctypes.byref(_rows(out, out, out))
        self._kernels.layerskip_layers(self._layers, len(states), rows, seen, places)
        return out


def _look(
    rotary: tuple[torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    place: int,
    look: tuple[int, torch.Tensor | None, bool],
) -> library.Look:
    """See `Attention.add_to`; the caller keeps the tensors until the kernel is done."""
    (cos, sin), (first, visible, _) = rotary, look
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    return library.Look(
        cos.data_ptr(),
        sin.data_ptr(),
        states.data_ptr(),
        states.shape[2],
        place,
        first,
        None if visible is None else visible.data_ptr(),
        0 if visible is None else visible.stride(0),
    )


def _norm(norm: Any) -> tuple[torch.Tensor | None, float]:
    """Weights in float32, kept as long as the kernels may read them, and epsilon; without weights nothing is normed."""
    if norm is None or isinstance(norm, nn.Identity):
        return None, 0.0
    assert isinstance(norm, Norm), f"no kernel for {type(norm).__name__}"
    return norm.weight.float().contiguous(), norm.eps


def _norm_part(weight: torch.Tensor | None, eps: float) -> library.Norm:
    return library.Norm(None if weight is None else weight.data_ptr(), eps)


def _rows(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> library.Rows:
    """The caller keeps the tensors until the kernel is done."""
    return library.Rows(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        len(x),
        int(x.dtype == torch.float32),
        torch.get_num_threads(),
    )
