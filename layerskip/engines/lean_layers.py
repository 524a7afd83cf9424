"""Lean decoder layers over a Llama-like model's own weights: the parts that one forward is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from layerskip.engines.linear import Linear, MakeLinear, fused


class Norm:
    """Root-mean-square norm over the last axis.

    In float32 on a CPU as four short operations, where the library's one runs seven:
    x / sqrt(mean(x^2) + eps) = x * sqrt(n) / hypot(|x|, sqrt(n * eps)).
    """

    def __init__(self, module: Any) -> None:
        self._weight: torch.Tensor = module.weight.detach()
        self._eps: float = module.variance_epsilon
        width = self._weight.shape[0]
        self._short = self._weight.dtype == torch.float32 and self._weight.device.type == "cpu"
        self._scaled_weight = self._weight * width**0.5
        self._floor = torch.tensor((width * self._eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._short:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scaled: torch.Tensor = x * (self._scaled_weight / torch.hypot(length, self._floor))
            return scaled
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


@dataclass(frozen=True)
class Attention:
    """One attention sublayer; the residual addition is the caller's (`out.add_to`)."""

    norm: Callable[[torch.Tensor], torch.Tensor]
    qkv: Linear
    out: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    num_queries: int
    num_keys: int
    head_dim: int
    scaling: float
    window: int | None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_queries // self.num_keys

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, each (T, heads, head_dim), of hidden states (T, hidden).

        Shapes: cos and sin (T, 1, head_dim), the sign of the rotation in `sin` (see `rotary_table`).
        """
        num_rotated = self.num_queries + self.num_keys
        heads = self.qkv(self.norm(x)).view(x.shape[0], num_rotated + self.num_keys, self.head_dim)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = rotated[:, : self.num_queries], rotated[:, self.num_queries :]
            rotated = torch.cat([self.query_norm(queries), self.key_norm(keys)], dim=1)
        low, high = rotated.chunk(2, dim=-1)
        rotated = torch.addcmul(rotated * cos, torch.cat([high, low], dim=-1), sin)
        return rotated[:, : self.num_queries], rotated[:, self.num_queries :], values

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attention over (B, heads, T, head_dim); keys may have fewer heads. `mask` is boolean, True = visible."""
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scaling,
            enable_gqa=self.num_queries != self.num_keys,
        )


@dataclass(frozen=True)
class Mlp:
    """One gated MLP sublayer."""

    norm: Norm
    gate_up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """x plus the sublayer's output."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return self.down.add_to(x, self.activation(gate).mul_(up))


@dataclass(frozen=True)
class Layer:
    """Both sublayers of one layer that stands by itself."""

    attention: Attention
    mlp: Mlp
    num_read: int | None = None
    """Columns of its input, the first so many, that attention reads, and to the others its output is added; None: all
    of them for both."""

    def sides(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads of x (T, width), and what its output is added to."""
        return (x, x) if self.num_read is None else (x[:, : self.num_read], x[:, self.num_read :])


def rotary_table(rotary: Any, like: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for positions 0..num_positions-1, each (num_positions, 1, head_dim)."""
    positions = torch.arange(num_positions, device=like.device).unsqueeze(0)
    cos, sin = rotary(like, positions)
    half = cos.shape[-1] // 2
    # rotate_half negates the first half after the swap; the sign lives in the table instead.
    signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1)


def attention_of(layer: Any, window: int | None, make: MakeLinear) -> Attention:
    attention = layer.self_attn
    head_dim: int = attention.head_dim
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    return Attention(
        norm=Norm(layer.input_layernorm),
        num_queries=attention.q_proj.out_features // head_dim,
        num_keys=attention.k_proj.out_features // head_dim,
        qkv=fused(make, attention.q_proj, attention.k_proj, attention.v_proj),
        out=fused(make, attention.o_proj),
        query_norm=Norm(query_norm) if query_norm is not None else None,
        key_norm=Norm(key_norm) if key_norm is not None else None,
        head_dim=head_dim,
        scaling=attention.scaling,
        window=window,
    )


def mlp_of(layer: Any, make: MakeLinear) -> Mlp:
    mlp = layer.mlp
    return Mlp(
        norm=Norm(layer.post_attention_layernorm),
        gate_up=fused(make, mlp.gate_proj, mlp.up_proj),
        down=fused(make, mlp.down_proj),
        activation=F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn,
    )
