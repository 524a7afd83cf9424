"""Lean decoder layers over a Llama-like model's own weights: the parts that one forward is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from layerskip.config.skip_mask import DraftBits
from layerskip.engines.lean.linear import Linear, fused
from layerskip.engines.lean.rotary import Rotation, rotated_halves
from layerskip.huggingface.growing_keys import FEW_ROWS, additive, attend_folded

_BOTH_SIDES = "pre_feedforward_layernorm"
"""In layers with norms before and after each sublayer, the one before the MLP."""
_AROUND_ONE = ("Gemma3RMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Norms whose weights say by how much they differ from one."""


class Norm:
    """Root-mean-square norm over the last axis, in float32.

    On a CPU as four short operations, where the library's one runs seven:
    x / sqrt(mean(x^2) + eps) = x * sqrt(n) / hypot(|x|, sqrt(n * eps)).
    """

    def __init__(
        self, module: Any, order: torch.Tensor | None = None, *, scale: float = 1.0, width: int | None = None
    ) -> None:
        """order: in which the numbers come, if not in their own; scale: what they are multiplied with besides; width:
        how many there are, of a norm without weights."""
        own = module.weight.detach() if width is None else torch.ones(width)
        self.weight: torch.Tensor = own if order is None else own[order]
        if type(module).__name__ in _AROUND_ONE:
            self.weight = self.weight.float() + 1.0
        if scale != 1.0:
            self.weight = self.weight.float() * scale
        self.eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        width = self.weight.shape[0]
        self._short = self.weight.device.type == "cpu"
        self._scaled_weight = self.weight.float() * width**0.5
        self._floor = torch.tensor((width * self.eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._short:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            scaled: torch.Tensor = x * (self._scaled_weight / torch.hypot(length, self._floor))
            return scaled.to(x.dtype)
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class FinishedLinear:
    """A product whose outputs are normed, and multiplied, before the residual is added; so is the sum after it. See
    `Linear`."""

    linear: Linear
    norm: Norm | None
    scale: float
    total: float = 1.0

    @property
    def num_outputs(self) -> int:
        return self.linear.num_outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        out = out if self.norm is None else self.norm(out)
        return out if self.scale == 1.0 else out * self.scale

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = residual + self(x)
        return out if self.total == 1.0 else out * self.total


@dataclass(frozen=True)
class Attention:
    """One attention sublayer."""

    causal_after_context: ClassVar[bool] = False
    """Whether `is_causal` may be said of rows that follow others; else those need a mask."""

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
    rotation: Rotation = ""
    is_gated: bool = False
    """Whether `qkv` also gives, last, a gate for each number that `out` takes. Compiled for a CPU alone, as what
    follows."""
    value_norm: Norm | None = None
    reads: bool = False
    """Whether keys and values are another layer's, so that `qkv` gives none."""

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_queries // self.num_keys

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of hidden states (T, hidden) rotated queries (1, query heads, T, head_dim), and rotated keys and values
        (1, 2 * key heads, T, head_dim).

        Shapes: cos and sin (T, 1, head_dim), the sign of the rotation in `sin` (see `rotary_table`).
        """
        num_queries, num_keys, num_rotated = self.num_queries, self.num_keys, self.num_queries + self.num_keys
        heads = self.qkv(self.norm(x)).view(1, x.shape[0], num_rotated + num_keys, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = heads.narrow(2, 0, num_queries), heads.narrow(2, num_queries, num_keys)
            values = heads.narrow(2, num_rotated, num_keys)
            heads = torch.cat([self.query_norm(queries), self.key_norm(keys), values], dim=2)
        rotated = heads.narrow(2, 0, num_rotated)
        swapped = rotated.roll(self.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        heads = heads.transpose(1, 2)
        return heads.narrow(1, 0, num_queries), heads.narrow(1, num_queries, 2 * num_keys)

    def look(self, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The boolean mask (T, keys), True = visible, additive, and folded where queries are."""
        mask = additive(visible, dtype)
        return mask.repeat(self.group, 1) if len(visible) <= FEW_ROWS else mask

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attention over (B, heads, T, head_dim); keys may have fewer heads. mask: (..., T, keys) boolean, True =
        visible, or see `look`."""
        if not is_causal and queries.shape[2] <= FEW_ROWS:
            return attend_folded(queries, keys, values, mask, self.scaling)
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scaling,
            enable_gqa=self.num_queries != self.num_keys,
        )

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        states: torch.Tensor,
        place: int,
        look: tuple[int, torch.Tensor | None, bool],
    ) -> torch.Tensor:
        """residual (T, width) plus the sublayer's output for x (T, hidden).

        Shapes: rotary as in `project`; states (1, 2 * key heads, positions, head_dim): keys and values, of which those
        of x go to `place` and after it; look: the first position that is seen, a mask (None = all) and `is_causal`.
        """
        queries, new = self.project(x, *rotary)
        num_rows, (first, mask, is_causal) = x.shape[0], look
        states.narrow(2, place, num_rows).copy_(new)
        seen = states.narrow(2, first, place + num_rows - first)
        keys, values = seen.narrow(1, 0, self.num_keys), seen.narrow(1, self.num_keys, self.num_keys)
        out = self.attend(queries, keys, values, mask, is_causal=is_causal)
        return self.out.add_to(residual, out[0].transpose(0, 1).reshape(num_rows, -1))


@dataclass(frozen=True)
class TokenGate:
    """A projection that is activated and then gated by what a token's id says to this layer, and one back."""

    into: Linear
    out: Linear
    first: int
    """Of what the ids say to all layers, side by side, where this layer's begins."""


@dataclass(frozen=True)
class Mlp:
    """One gated MLP sublayer."""

    norm: Norm
    gate_up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    token_gate: TokenGate | None = None
    """What follows it. Compiled for a CPU alone."""

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """x plus the sublayer's output."""
        both = self.gate_up(self.norm(x))
        width = both.shape[1] // 2
        return self.down.add_to(x, self.activation(both.narrow(1, 0, width)).mul_(both.narrow(1, width, width)))


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


def first_of(module: Any, *names: str) -> Any:
    """The part that this module has under one of these names, or None."""
    return next((part for one in names if (part := getattr(module, one, None)) is not None), None)


Activation = Callable[[torch.Tensor], torch.Tensor]


def gated_modules(mlp: Any) -> tuple[list[nn.Linear], nn.Linear, Activation]:
    """Of an MLP what gives gate and up, one module or two, what comes down, and its activation."""
    gate, up = first_of(mlp, "gate_proj", "w1", "input_linear"), first_of(mlp, "up_proj", "w3")
    activation = plain_activation(first_of(mlp, "act_fn", "activation") or F.silu)
    return [gate, *([] if up is None else [up])], first_of(mlp, "down_proj", "w2", "output_linear"), activation


def plain_activation(activation: Activation) -> Activation:
    """Modules that are SiLU are that function."""
    return F.silu if isinstance(activation, nn.SiLU | SiLUActivation) else activation


class LayerMaker(ABC):
    """Makes lean sublayers of a model's own, in one way of computing them."""

    @property
    def description(self) -> str:
        """Of that way, in a few words; empty where there is nothing to say."""
        return ""

    @abstractmethod
    def linear(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> Linear:
        """See `MakeLinear`."""

    @abstractmethod
    def rounded(self, bits: DraftBits) -> LayerMaker:
        """The same with weights rounded to so many bits; to 4 compiled for a CPU alone."""

    def recurrent(self, layer: Any) -> Any:
        """What a decoder layer that keeps a state has in attention's place. Compiled for a CPU alone."""
        raise NotImplementedError(type(layer).__name__)

    def attention(self, layer: Any, window: int | None, rotation: Rotation = "", count: int | None = None) -> Attention:
        """The attention of a decoder layer; window: of its sliding attention, if it slides; count: numbers of a head
        that are rotated, the first so many, None: all."""
        attention = layer.self_attn
        head_dim: int = attention.head_dim
        query_norm, key_norm = (first_of(attention, f"{one}_norm", f"{one}_layernorm") for one in "qk")
        out = first_of(attention, "o_proj", "out_proj")
        is_gated = attention.q_proj.out_features == 2 * out.in_features
        reads = getattr(attention, "is_kv_shared_layer", False)
        value_norm = getattr(attention, "v_norm", None)
        order = None if count in (None, head_dim) else rotated_halves(head_dim, count)
        return Attention(
            norm=Norm(first_of(layer, "input_layernorm", "operator_norm")),
            num_queries=out.in_features // head_dim,
            num_keys=out.in_features // head_dim // attention.num_key_value_groups,
            qkv=fused(self.linear, attention.q_proj) if reads else self._qkv(attention, order, is_gated=is_gated),
            out=self.finished(layer, out),
            query_norm=Norm(query_norm, order) if query_norm is not None else None,
            key_norm=Norm(key_norm, order) if key_norm is not None else None,
            head_dim=head_dim,
            scaling=attention.scaling,
            window=window,
            rotation=rotation,
            is_gated=is_gated,
            value_norm=None if value_norm is None else Norm(value_norm, width=head_dim),
            reads=reads,
        )

    def finished(
        self, layer: Any, module: nn.Linear, norm: str = "post_attention_layernorm", *, total: float = 1.0
    ) -> Linear:
        """The product that ends a sublayer; norm: the name of what follows it in layers with norms on both sides."""
        linear, scale = fused(self.linear, module), float(getattr(layer, "residual_multiplier", 1.0))
        after = Norm(getattr(layer, norm)) if hasattr(layer, _BOTH_SIDES) else None
        is_plain = after is None and scale == total == 1.0
        return linear if is_plain else FinishedLinear(linear, after, scale, total)

    def _token_gate(self, layer: Any, total: float) -> TokenGate | None:
        if not getattr(layer, "hidden_size_per_layer_input", None):
            return None
        out = self.finished(layer, layer.per_layer_projection, "post_per_layer_input_norm", total=total)
        into = layer.per_layer_input_gate
        return TokenGate(fused(self.linear, into), out, layer.layer_idx * into.out_features)

    def _qkv(self, attention: Any, order: torch.Tensor | None, *, is_gated: bool) -> Linear:
        """One product for queries, keys, values and gates; order: of the numbers of a head of queries and keys."""
        modules = (attention.q_proj, attention.k_proj, first_of(attention, "v_proj", "k_proj"))
        if order is None and not is_gated:
            return fused(self.linear, *modules)
        head_dim, places = attention.head_dim, torch.arange(sum(one.out_features for one in modules))
        queries, keys, values = torch.split(places, [one.out_features for one in modules])
        gates = places[:0]
        if is_gated:
            queries, gates = queries.view(-1, 2, head_dim).unbind(1)
        if order is not None:
            queries, keys = queries.reshape(-1, head_dim)[:, order], keys.view(-1, head_dim)[:, order]
        return fused(self.linear, *modules, order=torch.cat([one.flatten() for one in (queries, keys, values, gates)]))

    def mlp(self, layer: Any) -> Mlp:
        """The MLP of a decoder layer."""
        if getattr(layer, "enable_moe_block", False) or getattr(layer, "has_experts", False):
            raise ValueError("experts beside the MLP")
        gate_up, down, activation = gated_modules(first_of(layer, "mlp", "feed_forward", "shared_mlp"))
        total = float(getattr(layer, "layer_scalar", 1.0))
        gate_after = self._token_gate(layer, total)
        return Mlp(
            norm=Norm(first_of(layer, _BOTH_SIDES, "post_attention_layernorm", "pre_ff_layernorm", "ffn_norm")),
            gate_up=fused(self.linear, *gate_up),
            down=self.finished(layer, down, "post_feedforward_layernorm", total=total if gate_after is None else 1.0),
            activation=activation,
            token_gate=gate_after,
        )
