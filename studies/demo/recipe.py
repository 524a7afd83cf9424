"""What a training step does to the layers: which are dropped, where the early-exit loss is taken, the loss itself.

Ideas from LayerSkip (arXiv 2404.16710): dropout that rises with depth, and one shared head that must read every exit.
Here attention and MLP are dropped apart, because the search skips them apart, and one exit a step takes a loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from layerskip.engines.lean.rotary import text_positions

Skip = Sequence[tuple[bool, bool]]  # per layer: attention skipped, MLP skipped

BALANCE = 0.01
"""Of the loss that keeps experts in use alike. Ref: Fedus et al., "Switch Transformers" (2022)."""


@dataclass(frozen=True)
class Recipe:
    """How a model learns to run without some of its layers; all zero trains a stock model.

    dropout_max: drop probability of the last layer's sublayers, in [0, 1).
    exit_scale: weight of the early-exit loss relative to the target's, at the last layer; 0 switches it off.
    first_exit: earliest layer count that takes the loss, from 1.
    exit_power: the weight rises as (exit_layer / num_layers) to this power.
    late_from: share of training after which the exits move forward, in [0, 1]; 1 never moves them.
    late_last_exit: from then on only exits up to this one take the loss, all at the weight `exit_scale`.
    late_distill: from then on an exit learns the target's distribution instead of the text: what speculative decoding
        accepts is agreement with the target, right or wrong.
    """

    name: str
    dropout_max: float = 0.0
    exit_scale: float = 0.0
    first_exit: int = 1
    exit_power: float = 1.0
    late_from: float = 1.0
    late_last_exit: int = 6
    late_distill: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.dropout_max < 1:
            raise ValueError(f"dropout_max must lie in [0, 1), got {self.dropout_max}")
        if self.exit_scale < 0:
            raise ValueError(f"exit_scale must be 0 or more, got {self.exit_scale}")
        if self.first_exit < 1:
            raise ValueError(f"first_exit must be 1 or more, got {self.first_exit}")
        if self.late_last_exit < self.first_exit:
            raise ValueError(f"late_last_exit must be first_exit or more, got {self.late_last_exit}")

    def dropout_rates(self, num_layers: int) -> list[float]:
        """Drop probability per layer: 0 at the first, `dropout_max` at the last, rising exponentially between."""
        last = max(num_layers - 1, 1)
        return [self.dropout_max * (2.0 ** (layer / last) - 1.0) for layer in range(num_layers)]

    def draw_skip(self, num_layers: int, rng: random.Random) -> list[tuple[bool, bool]]:
        """The sublayers one step drops."""
        return [(rng.random() < rate, rng.random() < rate) for rate in self.dropout_rates(num_layers)]

    def draw_exit(self, num_layers: int, rng: random.Random, progress: float) -> tuple[int, float] | None:
        """(exit_layer, loss weight) of one step at a share of training, or None without an early-exit loss."""
        if self.exit_scale == 0 or self.first_exit >= num_layers:
            return None
        if progress >= self.late_from:
            return rng.randint(self.first_exit, min(self.late_last_exit, num_layers - 1)), self.exit_scale
        exit_layer = rng.randrange(self.first_exit, num_layers)
        return exit_layer, self.exit_scale * (exit_layer / num_layers) ** self.exit_power


RECIPES = {
    "stock": Recipe("stock"),
    "layerskip": Recipe("layerskip", dropout_max=0.2, exit_scale=1.0, first_exit=3, late_from=0.55, late_distill=True),
}


def run_layers(
    model: LlamaForCausalLM, ids: torch.Tensor, skip: Skip, exit_layer: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states before the final norm, after all layers and at `exit_layer`, of a forward without a cache.

    Shapes: ids (B, T) int64; hidden states (B, T, hidden size).
    """
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, text_positions(model.model.rotary_emb, ids.shape[1], ids.device))
    at_exit = None
    for index, (layer, (skip_attention, skip_mlp)) in enumerate(zip(model.model.layers, skip, strict=True)):
        if index == exit_layer:
            at_exit = hidden
        if not skip_attention:
            normed = layer.input_layernorm(hidden)
            hidden = hidden + _mix(layer, normed, rotary)
        if not skip_mlp:
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden, at_exit


def _mix(layer: Any, normed: torch.Tensor, rotary: Any) -> torch.Tensor:
    """What the layer's attention, of either kind, adds."""
    if hasattr(layer, "linear_attn"):
        added: torch.Tensor = layer.linear_attn(normed)
    else:
        added = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
    return added


def head_logits(model: LlamaForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """Float32 logits (B * T, V) of the shared head: final norm, then output embedding."""
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden)).float()
    return logits.flatten(0, 1)


def token_loss(model: LlamaForCausalLM, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats a token) of the shared head."""
    return F.cross_entropy(head_logits(model, hidden), labels.flatten())


@contextmanager
def _scores_of_experts(model: LlamaForCausalLM) -> Iterator[list[torch.Tensor]]:
    """Of each layer that has some, (tokens, experts), of the forward inside."""
    scores: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [gate.register_forward_hook(lambda _, __, output: scores.append(output[0])) for gate in gates]
    try:
        yield scores
    finally:
        for hook in hooks:
            hook.remove()


def training_loss(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    recipe: Recipe,
    rng: random.Random,
    progress: float = 0.0,
) -> tuple[torch.Tensor, float]:
    """(loss to descend, the target's own loss in nats) of one step."""
    num_layers = model.config.num_hidden_layers
    skip = recipe.draw_skip(num_layers, rng)
    drawn = recipe.draw_exit(num_layers, rng, progress)
    with _scores_of_experts(model) as scores:
        hidden, at_exit = run_layers(model, ids, skip, drawn[0] if drawn else None)
    logits = head_logits(model, hidden)
    target = F.cross_entropy(logits, labels.flatten())
    loss = target
    if drawn and at_exit is not None:
        distil = recipe.late_distill and progress >= recipe.late_from
        goal = logits.detach().softmax(dim=-1) if distil else labels.flatten()
        loss = target + drawn[1] * F.cross_entropy(head_logits(model, at_exit), goal)
    if scores:
        config: Any = model.config
        balance = [load_balancing_loss_func((one,), config.num_experts, config.num_experts_per_tok) for one in scores]
        loss = loss + BALANCE * torch.stack(balance).mean()
    value = target.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"loss is {value}: the run has diverged")
    return loss, value
