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
from layerskip.model import LayerSkipModel

_CPU_BYTES, _GPU_BYTES = 256 << 20, 2 << 30
"""More than any cache between memory and processor holds."""
_TIMES = 5


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


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a forward reads at least once: the weights of what runs, the head, and the cached keys and values.

    Left out: embedding rows, the last norm, activations, and what is written. Experts are counted whole, so for a
    mixture of experts this is more than a step of few tokens reads.
    """

    layers: tuple[LayerBytes, ...]
    head: int

    def of(self, mask: SkipMask | None, num_tokens: int, context: int) -> int:
        """A forward over `num_tokens` after `context` cached tokens under a mask; None skips nothing."""
        total = self.head
        for i, layer in enumerate(self.layers):
            attention, mlp = (False, False) if mask is None else (mask.attention[i], mask.mlp[i])
            if not attention:
                visible = context + num_tokens
                if layer.window is not None:
                    visible = min(visible, layer.window + num_tokens - 1)
                total += layer.attention + visible * layer.cached_token
            total += (0 if mlp else layer.mlp) + (0 if attention and mlp else layer.other)
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
        a, m = _parameter_bytes(attention), _parameter_bytes(mlp)
        layers.append(LayerBytes(a + state, m, _parameter_bytes([layer]) - a - m, token, window))
    head: Any = model.model.get_output_embeddings()
    return StepBytes(tuple(layers), _parameter_bytes([head]))


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


def _parameter_bytes(modules: Iterable[nn.Module]) -> int:
    unique = {id(parameter): parameter.nbytes for module in modules for parameter in module.parameters()}
    return sum(unique.values())
