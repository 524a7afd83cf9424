"""Decoder sublayers by kernels compiled for this CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from layerskip.config.skip_mask import DraftBits
from layerskip.engines.lean.layers import Attention, LayerMaker, Mlp
from layerskip.engines.lean.rotary import Rotation
from layerskip.engines.native import library
from layerskip.engines.native.experts import NativeExperts, experts_of
from layerskip.engines.native.huge_pages import HugePages
from layerskip.engines.native.linear import (
    NativeEnding,
    NativeLinear,
    activation_number,
    norm_part,
    norm_weight,
    rows_of,
)
from layerskip.engines.native.recurrent import NativeLinearAttention, NativeRecurrent, NativeShortConv, NativeState

_MOST_HEAD_DIM = 1024


class NativeLayers(LayerMaker):
    """See `LayerMaker`. A row's numbers do not depend on how many rows it is computed with.

    Cost: a second copy of the weights, unless they are read in place. Raises: ValueError where there are no kernels.
    """

    def __init__(self, *, bits: DraftBits | None = None, in_place: bool = False) -> None:
        """bits: of the weights; None: as they are. in_place: no copy of whole weights, at the cost of some speed."""
        found = library.load_kernels()
        if isinstance(found, str):
            raise ValueError(f"kernels: {found}")
        self.kernels, self._bits, self.in_place = found, bits, in_place
        self._memory = HugePages()

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
        return "sublayers compiled for this CPU" + (", which read the weights in place" if self.in_place else "")

    def linear(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> NativeLinear:
        linear = NativeLinear.of(self.kernels, weights, bias, order, bits=self._bits, in_place=self.in_place)
        return linear.kept_in(self._memory)

    def _in_place(self, weight: torch.Tensor, bits: DraftBits | None) -> NativeLinear:
        """Without a copy of whole weights, whatever was asked for."""
        return NativeLinear.of(self.kernels, [weight], None, bits=bits, in_place=True).kept_in(self._memory)

    def rounded(self, bits: DraftBits) -> LayerMaker:
        return NativeLayers(bits=bits)

    def attention(self, layer: Any, window: int | None, rotation: Rotation = "", count: int | None = None) -> Attention:
        part = super().attention(layer, window, rotation, count)
        return part if part.head_dim > _MOST_HEAD_DIM else NativeAttention(**vars(part))

    def recurrent(self, layer: Any) -> NativeRecurrent:
        """See `LayerMaker`. Raises: ValueError for what is not written here."""
        kind = NativeShortConv if hasattr(layer, "conv") else NativeLinearAttention
        return kind.of(self, layer)

    def mlp(self, layer: Any) -> Any:
        """See `LayerMaker`; or `NativeExperts`. Raises: ValueError for what is not written here."""
        if (block := experts_of(layer)) is not None:
            return NativeExperts.of(self, layer, block, self._in_place, bits=self._bits)
        part = super().mlp(layer)
        return part if activation_number(part.activation) is None else NativeMlp(**vars(part))


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
        seen = _look(rotary, states, place, look, len(x))
        rows = rows_of(x, residual, out)
        self._qkv.kernels.layerskip_attention(ctypes.byref(self.part), ctypes.byref(rows), ctypes.byref(seen), 1, 0)
        return out

    @property
    def _qkv(self) -> NativeLinear:
        assert isinstance(self.qkv, NativeLinear)
        return self.qkv

    @cached_property
    def _norms(self) -> list[tuple[torch.Tensor | None, float]]:
        return [norm_weight(one) for one in (self.norm, self.query_norm, self.key_norm, self.value_norm)]

    @cached_property
    def _ending(self) -> NativeEnding:
        return NativeEnding.of(self.out)

    @cached_property
    def part(self) -> library.AttentionPart:
        """For the kernels."""
        norms = [norm_part(*one) for one in self._norms]
        sizes = (self.num_queries, self.num_keys, self.head_dim, self.scaling)
        return library.AttentionPart(*norms, self._qkv.matrix, self._ending.part, *sizes, self.is_gated, self.reads)


class NativeMlp(Mlp):
    """See `Mlp`."""

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = rows_of(x, x, out)
        self._gate_up.kernels.layerskip_mlp(ctypes.byref(self.part), ctypes.byref(rows))
        return out

    def put_into(self, layer: library.Layer) -> None:
        layer.mlp = ctypes.pointer(self.part)

    @property
    def _gate_up(self) -> NativeLinear:
        assert isinstance(self.gate_up, NativeLinear)
        return self.gate_up

    @cached_property
    def _norm_weight(self) -> tuple[torch.Tensor | None, float]:
        return norm_weight(self.norm)

    @cached_property
    def _ending(self) -> NativeEnding:
        return NativeEnding.of(self.down)

    @cached_property
    def part(self) -> library.MlpPart:
        """For the kernels."""
        norm, activation = norm_part(*self._norm_weight), activation_number(self.activation)
        assert activation is not None
        gate = None if self._gate is None else ctypes.pointer(self._gate[0])
        return library.MlpPart(norm, self._gate_up.matrix, self._ending.part, activation, gate)

    @cached_property
    def _gate(self) -> tuple[library.TokenGatePart, NativeEnding] | None:
        if (gate := self.token_gate) is None:
            return None
        assert isinstance(gate.into, NativeLinear)
        ending = NativeEnding.of(gate.out)
        return library.TokenGatePart(gate.into.matrix, ending.part, gate.first), ending


class TextRows(NamedTuple):
    """A text's share of the rows that come to some layers."""

    num_rows: int
    place: int
    """The first one's position."""
    states: Sequence[torch.Tensor | NativeState]
    """Of every layer."""
    looks: Sequence[tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, torch.Tensor | None, bool]]]
    """Rotary and look of those `looking`, see `Attention.add_to`."""


class NativeRun:
    """Some layers one after another, in one call: without it a step of 30 layers spends half a millisecond between
    them. Cost: 2 microseconds a layer to make."""

    def __init__(
        self, layers: Sequence[tuple[Attention | NativeRecurrent | None, Any]], keys_only: Collection[int] = ()
    ) -> None:
        """All made by `NativeLayers`, or None: skipped. keys_only: of attention at these places only keys and values
        are wanted."""
        self._kernels = NativeLayers().kernels
        by_look = {(one.window, one.rotation): one for one, _ in layers if isinstance(one, Attention)}
        self.looking = list(by_look.values())
        """An attention of every window and rotation."""
        places = list(by_look)
        self._layers = (library.Layer * len(layers))()
        for i, (layer, (attention, mlp)) in enumerate(zip(self._layers, layers, strict=True)):
            layer.keys_only = i in keys_only
            if isinstance(attention, NativeRecurrent):
                attention.put_into(layer)
            elif attention is not None:
                assert isinstance(attention, NativeAttention)
                layer.attention = ctypes.pointer(attention.part)
                layer.look = places.index((attention.window, attention.rotation))
            if mlp is not None:
                assert isinstance(mlp, NativeMlp | NativeExperts)
                mlp.put_into(layer)

    def __call__(self, x: torch.Tensor, texts: Sequence[TextRows], gates: torch.Tensor | None = None) -> torch.Tensor:
        """x (T, hidden), the rows of each text after the other, after these layers. gates: (T, numbers of all layers)
        see `TokenGate`.

        Raises: RuntimeError where a layer's state does not stand where a text's rows begin.
        """
        out = x.clone(memory_format=torch.contiguous_format)
        rows = rows_of(out, out, out)
        if gates is not None:
            rows.gates, rows.gates_stride = gates.data_ptr(), gates.stride(0)
        own = [_text(one, x) for one in texts]
        parts = ctypes.byref(own[0]) if len(own) == 1 else (library.Text * len(own))(*own)
        done = self._kernels.layerskip_layers(self._layers, len(self._layers), ctypes.byref(rows), parts, len(texts))
        if done < len(self._layers):
            raise RuntimeError(f"layer {done}'s state does not stand where a forward begins")
        return out


def _text(text: TextRows, x: torch.Tensor) -> library.Text:
    # As many positions in every layer.
    keyed = next((one for one in text.states if isinstance(one, torch.Tensor)), x)
    looks = (library.Look * len(text.looks))(
        *(_look(rotary, keyed, text.place, look, text.num_rows) for rotary, look in text.looks)
    )
    places = (one.data_ptr() if isinstance(one, torch.Tensor) else one.address for one in text.states)
    return library.Text(looks, (ctypes.c_void_p * len(text.states))(*places), text.place, text.num_rows)


def _look(
    rotary: tuple[torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    place: int,
    look: tuple[int, torch.Tensor | None, bool],
    count: int,
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
        count,
    )
