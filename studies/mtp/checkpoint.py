"""A checkpoint with a multi-token-prediction layer in it, as published ones have it, and that layer's training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

WEIGHTS = "model.safetensors"


def new_layer(model: PreTrainedModel) -> MtpModel:
    """One layer that begins as the identity on the model's state: it then says again what the model has just said."""
    found = MtpModel(model, 1)
    layer, hidden = found.layers[0], model.config.hidden_size
    with torch.no_grad():
        for name, one in layer.named_parameters():
            if one.ndim >= 2:
                torch.nn.init.normal_(one, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                torch.nn.init.zeros_(one)
        layer.eh_proj.weight[:, hidden:] += torch.eye(hidden)
        norm: Any = model.get_decoder().norm
        layer.post_norm.weight.copy_(norm.weight)
    for shared in (found.embed_tokens, found.shared_head):
        shared.requires_grad_(requires_grad=False)
    return found.train()


def layer_loss(model: PreTrainedModel, mtp: MtpModel, ids: torch.Tensor, depth: int = 1) -> torch.Tensor:
    """Mean cross-entropy with what the frozen model says, over `depth` drafts in a row; ids (B, T)."""
    drafts = list(_drafts(model, mtp, ids, depth))
    return sum((-(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean() for logits, wanted in drafts)) / depth


@torch.no_grad()
def agreement(model: PreTrainedModel, mtp: MtpModel, ids: torch.Tensor, depth: int) -> list[float]:
    """In what share of places the model would say the first, second, ... draft too; ids (B, T)."""
    return [
        (logits.argmax(-1) == wanted.argmax(-1)).double().mean().item()
        for logits, wanted in _drafts(model, mtp, ids, depth)
    ]


def _drafts(
    model: PreTrainedModel, mtp: MtpModel, ids: torch.Tensor, depth: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each draft in a row its logits (B, places, V), and the model's own.

    The layer reads the states that the model gave, and after the first draft its own, one position behind. Attention
    then sees a draft's own states where a round would still see the model's: good enough to train by.
    """
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    states, wanted = output.hidden_states[-1][:, :-1], output.logits[:, 1:]
    positions = torch.arange(1, ids.shape[1]).unsqueeze(0)
    embedded = mtp.embed_tokens(ids[:, 1:])
    hidden = torch.full((positions.shape[1],) * 2, torch.finfo(embedded.dtype).min).triu(1)[None, None]
    rotary = mtp.rotary_emb(embedded, position_ids=positions)
    for d in range(depth):
        states = mtp.layers[0](
            embedded,
            states,
            position_embeddings=rotary,
            attention_mask=hidden,
            position_ids=positions,
            past_key_values=None,
        )
        yield mtp.shared_head(states[:, d:]), wanted[:, d:]
        states = F.pad(states, (0, 0, 1, 0))[:, :-1]


def save_layer(mtp: MtpModel, num_layers: int, folder: Path) -> None:
    """Add it to a checkpoint of one file, behind the model's own layers."""
    weights = load_file(folder / WEIGHTS)
    for name, one in mtp.layers[0].state_dict().items():
        own = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        weights[f"model.layers.{num_layers}.{own}"] = one.detach().contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
