"""Sublayers that keep a state, by kernels compiled for this CPU: linear attention, Mamba 2, short convolutions."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from layerskip.config.validated import MAX_GAMMA
from layerskip.engines.lean.layers import LayerMaker, Norm
from layerskip.engines.lean.linear import Linear, fused
from layerskip.engines.native import library
from layerskip.engines.native.linear import NativeEnding, NativeLinear, norm_part, norm_weight

_NUM_LOGGED = 4 * MAX_GAMMA
"""Rows that a layer keeps; half of them can be taken back at least, more than any round has."""


@dataclass(frozen=True, eq=False)
class NativeRecurrent(ABC):
    """A sublayer that keeps a state. A row's numbers do not depend on how many rows it is computed with, nor on what
    has been taken back before.

    Cost: a row reads and writes the state once. After a rollback the rows that were accepted change the last kept state
    anew, without their products with weights.
    """

    norm: Norm
    inputs: Linear
    out: Linear
    conv: torch.Tensor
    """(taps, channels), float32."""

    @property
    @abstractmethod
    def num_logged(self) -> int:
        """Numbers that change the state, of a row."""

    @property
    def state_size(self) -> int:
        """Numbers of a state."""
        return (len(self.conv) - 1) * self.conv.shape[1]

    @property
    def native_inputs(self) -> NativeLinear:
        """As `NativeLayers` makes them."""
        assert isinstance(self.inputs, NativeLinear)
        return self.inputs

    @cached_property
    def _ending(self) -> NativeEnding:
        return NativeEnding.of(self.out)

    @abstractmethod
    def put_into(self, layer: library.Layer) -> None:
        """Its part for the kernels, which lives as long as this does."""


@dataclass(frozen=True, eq=False)
class NativeLinearAttention(NativeRecurrent):
    """Linear attention by the gated delta rule, or as Mamba 2 has it. Ref: Yang et al., "Gated Delta Networks" (2024);
    Dao and Gu, "Transformers are SSMs" (2024).

    `inputs` gives queries, keys and values, over which the convolution is; how much each value head writes, then what
    it keeps; gates.
    """

    out_norm: Norm
    conv_bias: torch.Tensor | None
    """(channels,), float32."""
    rates: torch.Tensor
    biases: torch.Tensor
    """(value heads,), float32: a head keeps exp(rate * softplus(x + bias)) of its state."""
    skips: torch.Tensor | None
    """(value heads,), float32: what a row's output has of its value besides."""
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    num_groups: int
    """Parts of a row's outputs that are normed after their gates; 0: each head's, before."""
    corrects: bool
    """Whether only what the state does not say already is written, by keys of length one."""

    @classmethod
    def of(cls, maker: LayerMaker, layer: Any) -> NativeLinearAttention:
        """A decoder layer's. Raises: ValueError if it has parts that are not written here."""
        return cls._of_mamba(maker, layer) if hasattr(layer, "mamba") else cls._of_delta_rule(maker, layer)

    @classmethod
    def _of_delta_rule(cls, maker: LayerMaker, layer: Any) -> NativeLinearAttention:
        own = layer.linear_attn
        modules = (own.in_proj_qkv, own.in_proj_b, own.in_proj_a, own.in_proj_z)
        if any(one.bias is not None for one in (*modules, own.out_proj, own.conv1d)):
            raise ValueError("linear attention with biases")
        _check_silu(own.activation, own.norm.activation)
        return cls(
            norm=Norm(layer.input_layernorm),
            inputs=maker.linear([one.weight.detach() for one in modules], None),
            out=maker.finished(layer, own.out_proj),
            conv=_taps(own.conv1d),
            out_norm=Norm(own.norm),
            conv_bias=None,
            rates=-own.A_log.detach().float().exp(),
            biases=own.dt_bias.detach().float().clone(),
            skips=None,
            num_keys=own.num_k_heads,
            num_values=own.num_v_heads,
            key_dim=own.head_k_dim,
            value_dim=own.head_v_dim,
            num_groups=0,
            corrects=True,
        )

    @classmethod
    def _of_mamba(cls, maker: LayerMaker, layer: Any) -> NativeLinearAttention:
        own = layer.mamba
        _check_silu(own.activation)
        if tuple(own.time_step_limit) != (0.0, float("inf")):
            raise ValueError(f"a state-space layer with time steps within {tuple(own.time_step_limit)}")
        inner, keys = own.intermediate_size, own.n_groups * own.ssm_state_size

        conv, places = own.conv1d, torch.arange(own.in_proj.out_features)
        gates, values, keys_, queries, steps = torch.split(places, [inner, inner, keys, keys, own.num_heads])
        return cls(
            norm=Norm(layer.input_layernorm),
            inputs=fused(maker.linear, own.in_proj, order=torch.cat([queries, keys_, values, steps, steps, gates])),
            out=maker.finished(layer, own.out_proj),
            conv=_in_order(_taps(conv), inner, keys),
            out_norm=Norm(own.norm),
            conv_bias=None if conv.bias is None else _in_order(conv.bias.detach().float(), inner, keys),
            rates=-own.A_log.detach().float().exp(),
            biases=own.dt_bias.detach().float().clone(),
            skips=own.D.detach().float().clone(),
            num_keys=own.n_groups,
            num_values=own.num_heads,
            key_dim=own.ssm_state_size,
            value_dim=own.head_dim,
            num_groups=inner // getattr(own.norm, "group_size", inner),  # Transformers 5.17 has one group alone
            corrects=False,
        )

    @property
    def num_logged(self) -> int:
        return self.conv.shape[1] + 2 * self.num_values

    @property
    def state_size(self) -> int:
        return self.num_values * self.key_dim * self.value_dim + super().state_size

    def put_into(self, layer: library.Layer) -> None:
        layer.linear_attention = ctypes.pointer(self._part)

    @cached_property
    def _part(self) -> library.LinearAttentionPart:
        norms = [norm_part(*one) for one in self._norms]
        tensors = (self.conv, self.conv_bias, self.rates, self.biases, self.skips)
        places = [None if one is None else one.data_ptr() for one in tensors]
        sizes = (self.num_keys, self.num_values, self.key_dim, self.value_dim, len(self.conv), self.num_groups)
        return library.LinearAttentionPart(
            *norms, self.native_inputs.matrix, self._ending.part, *places, *sizes, self.corrects
        )

    @cached_property
    def _norms(self) -> list[tuple[torch.Tensor | None, float]]:
        return [norm_weight(one) for one in (self.norm, self.out_norm)]


@dataclass(frozen=True, eq=False)
class NativeShortConv(NativeRecurrent):
    """A convolution over a few rows, gated before and after, as LFM2 has it; `inputs` gives both gates and then what is
    gated."""

    bias: torch.Tensor | None
    """(channels,), float32."""

    @classmethod
    def of(cls, maker: LayerMaker, layer: Any) -> NativeShortConv:
        """A decoder layer's."""
        own = layer.conv
        return cls(
            norm=Norm(layer.operator_norm),
            inputs=fused(maker.linear, own.in_proj),
            out=maker.finished(layer, own.out_proj),
            conv=_taps(own.conv),
            bias=None if own.conv.bias is None else own.conv.bias.detach().float().clone(),
        )

    @property
    def num_logged(self) -> int:
        return self.conv.shape[1]

    def put_into(self, layer: library.Layer) -> None:
        layer.short_conv = ctypes.pointer(self._part)

    @cached_property
    def _part(self) -> library.ShortConvPart:
        places = [None if one is None else one.data_ptr() for one in (self.conv, self.bias)]
        norm = norm_part(*self._norm_weight)
        return library.ShortConvPart(norm, self.native_inputs.matrix, self._ending.part, *places, len(self.conv))

    @cached_property
    def _norm_weight(self) -> tuple[torch.Tensor | None, float]:
        return norm_weight(self.norm)


def _check_silu(*activations: str) -> None:
    if set(activations) - {"silu", "swish"}:
        raise ValueError(f"linear attention with activations {' and '.join(activations)}")


def _in_order(channels: torch.Tensor, inner: int, keys: int) -> torch.Tensor:
    """Values, keys and queries (..., channels) the other way round."""
    return torch.cat(list(reversed(torch.split(channels, [inner, keys, keys], dim=-1))), dim=-1).contiguous()


def _taps(conv: Any) -> torch.Tensor:
    weight: torch.Tensor = conv.weight.detach().squeeze(1).float()
    return weight.t().contiguous()


class NativeState:
    """A layer's place in a `SharedLengthCache`: its state, two earlier ones, and the latest rows' part in them."""

    is_sliding = False

    def __init__(self, layer: NativeRecurrent, dtype: torch.dtype) -> None:
        """Of a text that has not begun. dtype: the model's."""
        self._kernels, self._layer = layer.native_inputs.kernels, layer
        self._states = [torch.zeros(layer.state_size), torch.zeros(layer.state_size), torch.empty(layer.state_size)]
        self._log = torch.empty(_NUM_LOGGED, layer.num_logged, dtype=dtype)
        places = [one.data_ptr() for one in self._states]
        self._memory = library.Memory(*places, 0, 0, -1, 0, self._log.data_ptr(), _NUM_LOGGED, 0, 0)

    @property
    def is_initialized(self) -> bool:
        """It has room from the beginning."""
        return True

    @property
    def nbytes(self) -> int:
        """Of its state."""
        return self._live.nbytes

    @property
    def address(self) -> int:
        """For the kernels."""
        return ctypes.addressof(self._memory)

    def roll_back(self, length: int) -> None:
        """Come to the state before the token at this position.

        Raises: RuntimeError if it is not known any more.
        """
        if not self._kernels.layerskip_roll_back(ctypes.byref(self._memory), ctypes.c_long(length)):
            raise RuntimeError(f"a layer's state at position {length} is not known any more")

    def rows(self, stop: int) -> tuple[torch.Tensor, ...]:
        """See `SharedLengthCache`: a copy of the state. Raises: RuntimeError if it does not stand there."""
        if self._memory.at != stop:
            raise RuntimeError(f"a layer's state stands at position {self._memory.at}, asked for at {stop}")
        layer, is_float32 = library.Layer(), self._log.dtype == torch.float32
        self._layer.put_into(layer)
        memory = ctypes.byref(self._memory)
        self._kernels.layerskip_settle(ctypes.byref(layer), memory, int(is_float32), torch.get_num_threads())
        return (self._live.clone(),)

    def fill(self, rows: tuple[torch.Tensor, ...], stop: int) -> None:
        """See `SharedLengthCache`."""
        memory = self._memory
        for one in self._states:
            one.copy_(rows[0])
        memory.live_at = memory.kept_at = memory.at = memory.log_from = stop
        memory.older_at = -1

    @property
    def _live(self) -> torch.Tensor:
        return self._states[0]
