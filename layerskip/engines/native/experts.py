"""NativeExperts: a mixture of experts in an MLP's place, by kernels compiled for this CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from layerskip.config.skip_mask import DraftBits
from layerskip.engines.lean.layers import LayerMaker, Norm, first_of, gated_modules, plain_activation
from layerskip.engines.lean.linear import fused
from layerskip.engines.native import library
from layerskip.engines.native.linear import NativeLinear, activation_number, norm_part, norm_weight, rows_of

InPlace = Callable[[torch.Tensor, DraftBits | None], NativeLinear]
"""Makes a matrix that is read where it lies, or one that is rounded to so many bits."""


@dataclass(frozen=True)
class Routing:
    """How a row's scores choose its experts."""

    by_sigmoid: bool
    """Each score by itself; else all of them by softmax."""
    rounds: bool = True
    """Whether scores are rounded as the model's numbers are."""
    least: float = 0.0
    """What is added to the chosen ones' sum before they are divided by it."""


ROUTINGS = {
    "MixtralTopKRouter": Routing(by_sigmoid=False),
    "Qwen2MoeTopKRouter": Routing(by_sigmoid=False),
    "Qwen3MoeTopKRouter": Routing(by_sigmoid=False),
    "Qwen3_5MoeTopKRouter": Routing(by_sigmoid=False),
    "GraniteMoeHybridTopKRouter": Routing(by_sigmoid=False),
    "Lfm2MoeTopKRouter": Routing(by_sigmoid=True, least=1e-6),
    "Glm4MoeTopkRouter": Routing(by_sigmoid=True, rounds=False, least=1e-20),
}
"""By the class of what chooses in Transformers."""


def experts_of(layer: Any) -> Any:
    """What a decoder layer has of them in its MLP's place, or None."""
    blocks = (getattr(layer, one, None) for one in ("block_sparse_moe", "mlp", "feed_forward"))
    return next((one for one in blocks if hasattr(one, "experts")), None)


@dataclass(frozen=True, eq=False)
class NativeExperts:
    """A row is computed by a few of many experts, and perhaps by one that all rows share. Its numbers do not depend on
    how many rows it is computed with.

    Cost: a step reads the weights of those experts that any of its rows chose. Whole weights are read in place; of 8
    bits they are a copy.
    """

    norm: Norm
    router: NativeLinear
    """Gives scores of all experts."""
    routing: Routing
    chooser: Any
    """The model's, for its settings."""
    preferences: torch.Tensor | None
    """(experts,), float32: added to scores where experts are chosen, not to their weights."""
    gate_up: tuple[NativeLinear, ...]
    down: tuple[NativeLinear, ...]
    shared: tuple[NativeLinear, NativeLinear] | None
    """Of the shared expert, gate and up, and down."""
    shared_router: NativeLinear | None
    """Gives the logit of the shared expert's weight; without it that is 1."""
    scale: float
    """Of what is added to the residual."""
    activation: int

    @classmethod
    def of(cls, maker: LayerMaker, layer: Any, block: Any, linear: InPlace, *, bits: DraftBits | None) -> NativeExperts:
        """A decoder layer's. Raises: ValueError if it has parts that are not written here."""
        chooser, own = first_of(block, "gate", "router"), block.experts
        routing, activation = ROUTINGS.get(type(chooser).__name__), activation_number(plain_activation(own.act_fn))
        if routing is None or activation is None:
            raise ValueError(f"experts chosen by {type(chooser).__name__}, or with an activation of their own")
        preferences = getattr(chooser, "e_score_correction_bias", getattr(block, "expert_bias", None))
        beside = first_of(block, "shared_expert", "shared_experts") or getattr(layer, "shared_mlp", None)
        gate = getattr(block, "shared_expert_gate", None)

        return cls(
            norm=Norm(first_of(layer, "post_attention_layernorm", "ffn_norm")),
            router=linear(chooser.weight, None),
            routing=routing,
            chooser=chooser,
            preferences=None if preferences is None else preferences.detach().float(),
            gate_up=tuple(linear(one, bits) for one in own.gate_up_proj.detach()),
            down=tuple(linear(one, bits) for one in own.down_proj.detach()),
            shared=None if beside is None else _shared(maker, beside),
            shared_router=None if gate is None else linear(gate.weight, None),
            scale=float(getattr(layer, "residual_multiplier", 1.0)),
            activation=activation,
        )

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """See `Mlp`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = rows_of(x, x, out)
        self.router.kernels.layerskip_experts(ctypes.byref(self.part), ctypes.byref(rows))
        return out

    def put_into(self, layer: library.Layer) -> None:
        layer.experts = ctypes.pointer(self.part)

    @cached_property
    def part(self) -> library.ExpertsPart:
        """For the kernels, which lives as long as this does."""
        chooser, num_experts = self.chooser, len(self.down)
        num_groups = getattr(chooser, "num_group", 1)
        return library.ExpertsPart(
            norm_part(*self._norm_weight),
            self.router.matrix,
            library.Matrix() if self.shared_router is None else self.shared_router.matrix,
            library.Matrix() if self.shared is None else self.shared[0].matrix,
            self._ending,
            *self._matrices,
            None if self.preferences is None else self.preferences.data_ptr(),
            num_experts,
            chooser.top_k,
            num_groups,
            getattr(chooser, "topk_group", num_groups),
            self.routing.least,
            getattr(chooser, "routed_scaling_factor", 1.0),
            self.routing.by_sigmoid,
            getattr(chooser, "norm_topk_prob", True),
            self.routing.rounds,
            self.activation,
        )

    @cached_property
    def _ending(self) -> library.Ending:
        down = library.Matrix(outputs=self.router.num_inputs) if self.shared is None else self.shared[1].matrix
        return library.Ending(down, norm_part(None, 0.0), self.scale, 1.0)

    @cached_property
    def _matrices(self) -> list[Any]:
        return [(library.Matrix * len(some))(*(one.matrix for one in some)) for some in (self.gate_up, self.down)]

    @cached_property
    def _norm_weight(self) -> tuple[torch.Tensor | None, float]:
        return norm_weight(self.norm)


def _shared(maker: LayerMaker, mlp: Any) -> tuple[NativeLinear, NativeLinear]:
    modules, last, _ = gated_modules(mlp)
    gate_up, down = fused(maker.linear, *modules), fused(maker.linear, last)
    assert isinstance(gate_up, NativeLinear)
    assert isinstance(down, NativeLinear)
    return gate_up, down
