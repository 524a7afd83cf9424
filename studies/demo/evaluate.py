"""What a checkpoint is worth as a demo: held-out loss."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from studies.demo.recipe import run_layers, token_loss


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, *, window: int = 512, batch: int = 8) -> float:
    """Mean loss in nats a token of the full model over a token stream, in windows."""
    num_windows = (len(stream) - 1) // window
    total, count = 0.0, 0
    for first in range(0, num_windows, batch):
        rows = range(first, min(first + batch, num_windows))
        ids = torch.stack([stream[r * window : (r + 1) * window] for r in rows]).to(model.device)
        labels = torch.stack([stream[r * window + 1 : (r + 1) * window + 1] for r in rows]).to(model.device)
        hidden, _ = run_layers(model, ids, no_skip(model))
        total += float(token_loss(model, hidden, labels)) * len(rows)
        count += len(rows)
    return total / count


def no_skip(model: LlamaForCausalLM) -> list[tuple[bool, bool]]:
    """The mask that runs every sublayer."""
    return [(False, False)] * int(model.config.num_hidden_layers)
