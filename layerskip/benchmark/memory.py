"""Bytes that a step must read, and how many this device reads in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerskip.config.skip_mask import SkipMask
from layerskip.decoding.step_clock import StepClock
from layerskip.engines import Engine
from layerskip.huggingface.quantization.products import BYTES
from layerskip.model import LayerSkipModel

_CPU_BYTES, _GPU_BYTES = 256 << 20, 2 << 30
"""More than any cache between memory and processor holds."""
_TIMES = 5
_EXPERTS_NDIM = 3
"""Axes of what holds all experts of a layer; so has a convolution, of single channels."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configs name the number of experts."""


@dataclass(frozen=True)
class LayerBytes:
    """One decoder layer."""

    attention: int
    mlp: int
    other: int
    """What is in neither sublayer: norms. Read unless the whole layer is skipped."""
    cached_token: int
    """Keys and values of one token."""
    window: int | None
    state: int = 0
    """Kept in place of keys and values."""
    experts: int = 0
    """Of `mlp`, what only those tokens read that chose it."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a forward reads at least once: the weights of what runs, the head, and the cached keys and values.

    Left out: embedding rows, the last norm, activations, and what is written. Of experts as many are counted as tokens
    read that choose them by chance; those of one text choose fewer.
    """

    layers: tuple[LayerBytes, ...]
    head: int
    weight_size: int
    """Bytes of a weight; in rounded drafts it is fewer."""
    chosen_share: float = 1.0
    """Of all experts, what a token takes."""
    head_row: int = 0
    """Of `head`, a token id's."""

    def of(self, mask: SkipMask | None, num_tokens: int, context: int) -> int:
        """A forward over `num_tokens` after `context` cached tokens under a mask; None skips nothing."""
        bits = None if mask is None else mask.bits
        share = 1.0 if bits is None else BYTES[bits] / self.weight_size
        unread = (1 - self.chosen_share) ** num_tokens
        count = None if mask is None else mask.draft_vocab
        head = self.head if count is None else min(self.head, count * self.head_row)
        total = head if bits is None else head // self.weight_size
        for i, layer in enumerate(self.layers):
            attention, mlp = (False, False) if mask is None else (mask.attention[i], mask.mlp[i])
            if not attention:
                visible = context + num_tokens
                if layer.window is not None:
                    visible = min(visible, layer.window + num_tokens - 1)
                total += round(layer.attention * share) + layer.state + visible * layer.cached_token
            total += (0 if mlp else round((layer.mlp - unread * layer.experts) * share)) + (
                0 if attention and mlp else layer.other
            )
        return total


def step_bytes(model: LayerSkipModel) -> StepBytes:
    """Counted from the model's parameters and the cache that its engine makes. Cost: a forward over one token."""
    engine, adapter = model.engine, model.adapter
    with engine.session(1):
        engine.forward(torch.zeros(1, dtype=torch.long, device=engine.device))
        layers, recurrent = engine.cache.layers, adapter.recurrent_layers
        states = [one.nbytes if i in recurrent else 0 for i, one in enumerate(layers)]
        cached = [
            0 if i in recurrent else _token_bytes(one.keys) + _token_bytes(one.values) for i, one in enumerate(layers)
        ]
        none = [0] * (adapter.num_layers - adapter.num_keyed)  # layers that read others' keys
        cached, states = cached + none, states + none
    layers = []
    for layer, (attention, mlp), window, token, state in zip(
        adapter.layers, adapter.sublayers, adapter.windows, cached, states, strict=True
    ):
        a, m = _parameter_bytes(attention, engine), _parameter_bytes(mlp, engine)
        experts = sum(one.nbytes for one in layer.parameters() if one.ndim == _EXPERTS_NDIM and one.shape[1] > 1)
        layers.append(LayerBytes(a, m, _parameter_bytes([layer], engine) - a - m, token, window, state, experts))
    head: Any = model.model.get_output_embeddings()
    config = adapter.text_config
    count = next((n for one in _COUNTS if (n := getattr(config, one, None))), None)
    share = 1.0 if count is None else config.num_experts_per_tok / count
    head_bytes = _parameter_bytes([head], engine)
    return StepBytes(
        tuple(layers), head_bytes, max(1, head_bytes // head.weight.numel()), share, head_bytes // len(head.weight)
    )


def read_bandwidth(engine: Engine) -> float:
    """Bytes/s of an engine's device, by torch's threads: the best of summing and of copying (read and written) a tensor
    larger than the caches.

    A model that fits into the caches can be read faster than this.
    """
    device, clock = engine.device, StepClock(engine)
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else 4 * _CPU_BYTES
    size = min(_GPU_BYTES, free // 4) if cuda else _CPU_BYTES
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def seconds(operation: Callable[[], object]) -> float:
        operation()
        best = float("inf")
        for _ in range(_TIMES):
            clock.skip()
            operation()
            best = min(best, clock.lap())
        return best

    return max(source.nbytes / seconds(source.sum), 2 * source.nbytes / seconds(lambda: target.copy_(source)))


def _token_bytes(buffer: torch.Tensor) -> int:
    """Of a (B, heads, capacity, width) buffer."""
    return buffer[:, :, 0].numel() * buffer.element_size()


def _parameter_bytes(modules: Iterable[nn.Module], engine: Engine) -> int:
    unique = {id(parameter): engine.bytes_read(parameter) for module in modules for parameter in module.parameters()}
    return sum(unique.values())
