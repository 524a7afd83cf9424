"""LeanExecutor: the fused engine's lean layers in static form, for Llama-like models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.engines.compiled import CompiledFunctions
from layerskip.engines.cuda_graph.attention import AttentionChoice, AttentionShape
from layerskip.engines.cuda_graph.attention_kernels import Kernel, attend
from layerskip.engines.cuda_graph.static_step import Branches, additive_mask
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean.layers import Attention, Layer, Mlp
from layerskip.huggingface.growing_keys import folded
from layerskip.huggingface.kv_cache import StaticCache


class LeanExecutor:
    """See `StaticExecutor`. Shares the weights of `fused`, which also processes the prompts.

    Attention is over folded queries, see `attend_folded`: left to `enable_gqa`, a mask sends it down a path that
    copies the keys for every query head.

    compiled: run what lies before attention, what follows it, and the MLP through torch.compile. Attention itself is
    left to a kernel of the library, so what is compiled depends on the number of tokens, the size of the cache's
    buffers and whether weights have 8 bits: it serves every layer, every mask and every number of visible positions.
    None runs all as it is.
    attention: None is what may be tried on the device.
    """

    def __init__(
        self,
        fused: FusedEngine,
        *,
        compiled: CompiledFunctions | None = None,
        attention: AttentionChoice | None = None,
    ) -> None:
        self.fused = fused
        self.compiled = compiled
        self.attention = attention or AttentionChoice.on(fused.device)
        self.vocab_size = fused.head.num_outputs
        self.logits_dtype = fused.embedding.dtype

    @property
    def num_compilations(self) -> int:
        return 0 if self.compiled is None else self.compiled.num_compilations

    @property
    def attention_backend(self) -> str:
        return self.attention.description

    def use(self, cache: StaticCache) -> None:
        self._cache = cache
        self._states: dict[tuple[int, ...], torch.Tensor] = {}
        """By the layers that they are of; recordings write there, so they stay as long as the cache's buffers."""
        fused = self.fused
        self.attention.measure(self._attention_shape(), cache.num_positions)
        # A table of its own: the fused engine's is replaced when a longer text comes, and recordings hold its address.
        self._rotations = fused.rotations(cache.num_positions)
        for (attention, _), layer in zip(fused.layers, cache.layers, strict=True):
            like = fused.embedding.new_empty((1, attention.num_keys, 0, attention.head_dim))
            layer.lazy_initialization(like, like)

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.fused.session_over(self._cache):
            yield

    def prepare_draft(self, mask: SkipMask) -> None:
        self.fused.prepare_draft(mask)

    def keep_states(self, aux_layers: Sequence[int]) -> None:
        """See `StatesEngine`; of steps as well. Memory: kept until a longer text comes."""
        layers = (*aux_layers, len(self.fused.layers) - 1)
        if layers not in self._states:
            self._states[layers] = self.fused.new_states(self._cache.num_positions, len(layers))
        self.fused.keep_states(aux_layers, self._states[layers])

    def forward(self, ids: torch.Tensor, mask: SkipMask, num_logits: int) -> torch.Tensor:
        # Without a mask with its states, where they are kept.
        return self.fused.forward(ids, None if _is_none(mask) else mask, num_logits=num_logits)

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: SkipMask,
        num_visible: int,
        num_logits: int,
        branches: Branches | None = None,
    ) -> torch.Tensor:
        fused, num_tokens = self.fused, ids.shape[0]
        layers = fused.layers_of(mask)
        project = self._function(_project_and_store, num_tokens, self._cache.num_positions)
        finish_both = self._function(_finish_and_add_mlp, num_tokens)
        add_mlp = self._function(_add_mlp, num_tokens)
        rotary = {
            name: (cos.index_select(0, positions), sin.index_select(0, positions))
            for name, (cos, sin) in self._rotations.items()
        }
        slots = positions if branches is None else branches.slots
        masks, attend = _Masks(positions, num_visible, branches), self.attention.kernel(num_visible)
        x = fused.embedded(ids)
        kept = []
        for i, (attention, mlp) in enumerate(layers):
            buffers, skip_mlp = self._cache.layers[i], mask.mlp[i]
            if mask.attention[i]:
                x = x if skip_mlp else add_mlp(mlp, x)
            else:
                queries = project(attention, x, buffers.states, slots, rotary[attention.rotation])
                attended = _attend(attend, attention, queries, buffers.states, masks.of(attention, x.dtype))
                x = _finish(attention, x, attended) if skip_mlp else finish_both(attention, mlp, x, attended)
            if i in fused.kept_layers:
                kept.append(x)
        if kept and _is_none(mask):
            fused.states.index_copy_(0, slots, torch.cat(kept, dim=-1))
        return fused.logits(x[-num_logits:], mask)

    def _attention_shape(self) -> AttentionShape:
        layers, like = [attention for attention, _ in self.fused.layers], self.fused.embedding
        first, windows = layers[0], frozenset(layer.window for layer in layers)
        return AttentionShape(first.num_queries, first.num_keys, first.head_dim, windows, like.dtype, like.device)

    def _function(self, function: Callable[..., torch.Tensor], *sizes: int) -> Callable[..., torch.Tensor]:
        return function if self.compiled is None else self.compiled.variant(function, *sizes)


def _is_none(mask: SkipMask) -> bool:
    return mask == SkipMask.none(mask.num_layers)


class _Masks:
    """Of one step, made once for all layers alike."""

    def __init__(self, positions: torch.Tensor, num_visible: int, branches: Branches | None) -> None:
        self._positions, self._num_visible, self._branches = positions, num_visible, branches
        self._made: dict[tuple[int | None, int], torch.Tensor] = {}

    def of(self, layer: Attention, dtype: torch.dtype) -> torch.Tensor:
        key = (layer.window, layer.group)
        if key not in self._made:
            positions, num_visible = self._positions, self._num_visible
            self._made[key] = additive_mask(
                positions, num_visible, key[0], dtype, repeats=key[1], branches=self._branches
            )
        return self._made[key]


def _project_and_store(
    layer: Attention,
    x: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Folded queries (1, key heads, group * T, head_dim); keys and values go into `states`, at these places.

    Shapes: states and rotary as in `Attention.add_to`.
    """
    queries, new = layer.project(x, *rotary)
    states.index_copy_(2, slots, new)
    return folded(queries, layer.num_keys)


def _attend(
    kernel: Kernel, layer: Attention, queries: torch.Tensor, states: torch.Tensor, look: torch.Tensor
) -> torch.Tensor:
    """Attention (1, key heads, group * T, head_dim) over the positions that the mask `look` has columns for."""
    keys, values = states[:, :, : look.shape[1]].chunk(2, dim=1)
    return kernel(queries, keys, values, look, layer.scaling)


def _finish(layer: Attention, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """x plus the output product of what `_attend` gave."""
    num_tokens = x.shape[0]
    unfolded = attended.view(layer.num_queries, num_tokens, layer.head_dim).transpose(0, 1)
    return layer.out.add_to(x, unfolded.reshape(num_tokens, -1))


def _finish_and_add_mlp(layer: Attention, mlp: Mlp, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """`_finish` and the MLP in one, so that a compiler can join the sum between them with the norm after it."""
    return mlp.add_to(_finish(layer, x, attended))


def _add_mlp(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    return mlp.add_to(x)


def static_layer(
    layer: Layer,
    x: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    look: torch.Tensor,
) -> torch.Tensor:
    """One layer over x (T, width) by itself, for what drafts with one: keys and values go to `slots` of `states`.

    Shapes: look as `additive_mask` gives it, its rows repeated for each query head of a key head.
    """
    attention, (read, residual) = layer.attention, layer.sides(x)
    queries = _project_and_store(attention, read, states, slots, rotary)
    return _finish_and_add_mlp(attention, layer.mlp, residual, _attend(attend, attention, queries, states, look))
