"""Gated linear attention (the gated delta rule) by kernels compiled for this CPU, and what it keeps of a text."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from layerskip.config.validated import MAX_GAMMA
from layerskip.engines.lean_layers import Norm
from layerskip.engines.native import library
from layerskip.engines.native.linear import NativeLinear, norm_part, norm_weight

_NUM_LOGGED = 4 * MAX_GAMMA
"""Rows that a layer keeps; half of them can be taken back at least, more than any round has."""


@dataclass(frozen=True, eq=False)
class NativeDeltaRule:
    """One sublayer with gated linear attention. A row's numbers do not depend on how many rows it is computed with, nor
    on what has been taken back before.

    Cost: a row reads and writes the state once. After a rollback the rows that were accepted are run over the last kept
    state anew, without their products with weights.
    Ref: Yang et al., "Gated Delta Networks" (2024).
    """

    norm: Norm
    inputs: NativeLinear
    """To queries, keys, values; how much each value head writes, then what it keeps; gates."""
    out: NativeLinear
    out_norm: Norm
    conv: torch.Tensor
    """(taps, channels of queries, keys and values), float32."""
    rates: torch.Tensor
    biases: torch.Tensor
    """(value heads,), float32: a head keeps exp(rate * softplus(x + bias)) of its state."""
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(
        cls, linear: Callable[[Sequence[torch.Tensor], torch.Tensor | None], NativeLinear], layer: Any
    ) -> NativeDeltaRule:
        """A decoder layer's; linear: makes a product, see `MakeLinear`."""
        own = layer.linear_attn
        inputs = [one.weight.detach() for one in (own.in_proj_qkv, own.in_proj_b, own.in_proj_a, own.in_proj_z)]
        return cls(
            norm=Norm(layer.input_layernorm),
            inputs=linear(inputs, None),
            out=linear([own.out_proj.weight.detach()], None),
            out_norm=Norm(own.norm),
            conv=own.conv1d.weight.detach().squeeze(1).float().t().contiguous(),
            rates=-own.A_log.detach().float().exp(),
            biases=own.dt_bias.detach().float().clone(),
            num_keys=own.num_k_heads,
            num_values=own.num_v_heads,
            key_dim=own.head_k_dim,
            value_dim=own.head_v_dim,
        )

    @staticmethod
    def refusal(layer: Any) -> str | None:
        """Why a decoder layer's cannot be computed so; None where it can."""
        own = layer.linear_attn
        activations = (own.activation, own.norm.activation)
        if any(one not in ("silu", "swish") for one in activations):
            return f"gates of {' and '.join(map(str, activations))}"
        modules = (own.in_proj_qkv, own.in_proj_b, own.in_proj_a, own.in_proj_z, own.out_proj, own.conv1d)
        return "biases" if any(one.bias is not None for one in modules) else None

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @cached_property
    def part(self) -> library.DeltaRulePart:
        """For the kernels."""
        norms = [norm_part(*one) for one in self._norms]
        places = [one.data_ptr() for one in (self.conv, self.rates, self.biases)]
        sizes = (self.num_keys, self.num_values, self.key_dim, self.value_dim, len(self.conv))
        return library.DeltaRulePart(*norms, self.inputs.matrix, self.out.matrix, *places, *sizes)

    @cached_property
    def _norms(self) -> list[tuple[torch.Tensor | None, float]]:
        return [norm_weight(one) for one in (self.norm, self.out_norm)]


class NativeState:
    """A layer's place in a `SharedLengthCache`: its state, two earlier ones, and the latest rows' part in them."""

    is_sliding = False

    def __init__(self, layer: NativeDeltaRule, dtype: torch.dtype) -> None:
        self._kernels, self._part = layer.inputs.kernels, layer.part
        size = layer.num_values * layer.key_dim * layer.value_dim + (len(layer.conv) - 1) * layer.num_channels
        self._states = [torch.zeros(size) for _ in range(3)]
        self._log = torch.zeros(_NUM_LOGGED, layer.num_channels + 2 * layer.num_values, dtype=dtype)
        places = [one.data_ptr() for one in self._states]
        self._memory = library.Memory(*places, 0, 0, -1, 0, self._log.data_ptr(), _NUM_LOGGED, 0, 0)

    @property
    def is_initialized(self) -> bool:
        """It has room from the beginning."""
        return True

    @property
    def nbytes(self) -> int:
        """Of its state."""
        return self._states[0].nbytes

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
        self._kernels.layerskip_settle(
            ctypes.byref(self._part),
            ctypes.byref(self._memory),
            int(self._log.dtype == torch.float32),
            torch.get_num_threads(),
        )
        return (self._live.clone(),)

    def fill(self, rows: tuple[torch.Tensor, ...], stop: int) -> None:
        """See `SharedLengthCache`."""
        self._live.copy_(rows[0])
        memory = self._memory
        next(one for one in self._states if one.data_ptr() == memory.kept).copy_(rows[0])
        memory.live_at = memory.kept_at = memory.at = memory.log_from = stop
        memory.older_at = -1

    @property
    def _live(self) -> torch.Tensor:
        return self._states[0]
