"""LeanExecutor: the fused engine's lean layers in static form, for Llama-like models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean_layers import Attention, Mlp, rotary_table
from layerskip.engines.static_step import additive_mask
from layerskip.kv_cache import StaticCache
from layerskip.skip_mask import SkipMask


class LeanExecutor:
    """See `StaticExecutor`. Shares the weights of `fused`, which also processes the prompts.

    Attention folds the query heads that share a key head into more queries: the keys and values of a head are read
    once, by one kernel. Left to `enable_gqa`, a mask sends it down a path that copies the keys for every query head.

    compile_layers: run attention and MLP through torch.compile. What is compiled for one layer serves all others of the
    same window, and all masks; a new number of tokens or visible positions compiles anew, up to torch's own limit of
    variants, beyond which layers run as they are. Not measured on a GPU yet, hence off.
    """

    def __init__(self, fused: FusedEngine, *, compile_layers: bool = False) -> None:
        self.fused = fused
        self.vocab_size = fused.head.weight.shape[1]
        self.logits_dtype = fused.head.weight.dtype
        self._run_attention: Callable[..., torch.Tensor] = _attend
        self._run_mlp: Callable[[Mlp, torch.Tensor], torch.Tensor] = _add_mlp
        if compile_layers:
            self._run_attention = torch.compile(_attend, dynamic=False)
            self._run_mlp = torch.compile(_add_mlp, dynamic=False)

    def use(self, cache: StaticCache) -> None:
        self._cache = cache
        fused = self.fused
        # A table of its own: the fused engine's is replaced when a longer text comes, and recordings hold its address.
        self._cos, self._sin = rotary_table(fused.rotary, fused.embedding[:1], cache.num_positions)
        for (attention, _), layer in zip(fused.layers, cache.layers, strict=True):
            like = fused.embedding.new_empty((1, attention.num_keys, 0, attention.head_dim))
            layer.lazy_initialization(like, like)

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.fused.session_over(self._cache):
            yield

    def forward(self, ids: torch.Tensor, mask: SkipMask, num_logits: int) -> torch.Tensor:
        return self.fused.forward(ids, mask, num_logits=num_logits)

    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: SkipMask, num_visible: int, num_logits: int
    ) -> torch.Tensor:
        fused = self.fused
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        shared = _Shared(positions, cos, sin, num_visible)
        x = F.embedding(ids, fused.embedding)
        for (attention, mlp), buffers, skip_attention, skip_mlp in zip(
            fused.layers, self._cache.layers, mask.attention, mask.mlp, strict=True
        ):
            if not skip_attention:
                look = shared.mask_for(attention, x.dtype)
                x = self._run_attention(attention, x, buffers.keys, buffers.values, look, shared)
            if not skip_mlp:
                x = self._run_mlp(mlp, x)
        return fused.head(fused.norm(x[-num_logits:]))


class _Shared:
    """What all layers of one step share."""

    def __init__(self, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_visible: int) -> None:
        self.positions, self.cos, self.sin, self.num_visible = positions, cos, sin, num_visible
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def mask_for(self, layer: Attention, dtype: torch.dtype) -> torch.Tensor:
        key = (layer.window, layer.num_queries // layer.num_keys)
        if key not in self._masks:
            self._masks[key] = additive_mask(self.positions, self.num_visible, key[0], dtype, repeats=key[1])
        return self._masks[key]


def _attend(
    layer: Attention, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, look: torch.Tensor, shared: Any
) -> torch.Tensor:
    """x plus attention; keys and values of the new positions go into the buffers (1, heads, positions, head_dim)."""
    num_tokens, group = x.shape[0], layer.num_queries // layer.num_keys
    queries, new_keys, new_values = layer.project(x, shared.cos, shared.sin)
    keys.index_copy_(2, shared.positions, new_keys.transpose(0, 1).unsqueeze(0))
    values.index_copy_(2, shared.positions, new_values.transpose(0, 1).unsqueeze(0))
    folded = queries.reshape(num_tokens, layer.num_keys, group, layer.head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        folded.reshape(1, layer.num_keys, group * num_tokens, layer.head_dim),
        keys[:, :, : shared.num_visible],
        values[:, :, : shared.num_visible],
        attn_mask=look,
        scale=layer.scaling,
    )
    unfolded = out.view(layer.num_keys, group, num_tokens, layer.head_dim).permute(2, 0, 1, 3)
    return layer.out.add_to(x, unfolded.reshape(num_tokens, -1))


def _add_mlp(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    return mlp.add_to(x)
