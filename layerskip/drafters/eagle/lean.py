"""LeanHead: a `StateHead` as lean operations, LeanText: one text's keys and values under it, and an `EagleHead` so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from layerskip.drafters.eagle.head import EagleHead
from layerskip.drafters.eagle.state_head import StateHead, StateText
from layerskip.engines.lean.layers import Layer, LayerMaker, Norm
from layerskip.engines.lean.linear import Linear, fused
from layerskip.engines.lean.rotary import rotary_table
from layerskip.engines.states import StatesEngine
from layerskip.huggingface.growing_keys import over_growing_keys


class LeanHead(StateHead):
    """Lean operations on one text's rows, keys and values in buffers of the text's own. An engine may record them.

    Cost: a second copy of its matrices, or of most of them, and the measurement of how they should lie.
    """

    layer: Layer
    rotary: Any
    """What gives positions their cosines and sines."""
    like: torch.Tensor
    """(1, hidden), of the number format and on the device of its states."""
    _rotations: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cosines and sines as far as a text has needed them."""

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """(T, hidden): the state that a drafted token goes on from, of what the layer gave."""
        return out

    def new_text(self, capacity: int) -> LeanText:
        attention = self.layer.attention
        if self._rotations is None or len(self._rotations[0]) < capacity:
            self._rotations = rotary_table(self.rotary, self.like, capacity)
        shape = (1, 2 * attention.num_keys, capacity, attention.head_dim)
        return LeanText(self, self.like.new_empty(shape), *self._rotations)


class LeanEagle(LeanHead):
    """An `EagleHead` for drafting."""

    def __init__(self, head: EagleHead, output_embedding: Any, fingerprint: str, maker: LayerMaker) -> None:
        """output_embedding: the target's; fingerprint: of the weights, see `DraftWeights`."""
        self.module: EagleHead = head
        self.fingerprint, self.aux_layers, self.vocab_size = fingerprint, head.shape.aux_layers, head.shape.vocab_size
        self._output_embedding = output_embedding
        self._heads: dict[int, Linear] = {}
        """By how many of the draft ids they choose among."""
        weight = head.project.weight
        self._maker = maker
        with torch.inference_mode(mode=False), torch.no_grad():
            layer: Any = head.layer
            self.layer = Layer(maker.attention(layer, None), maker.mlp(layer))
            self._project = fused(maker.linear, head.project)
            self._joined = fused(maker.linear, head.joined) if head.joined is not None else None
            self._embed_norm, self._state_norm = Norm(head.embed_norm), Norm(head.state_norm)
            self.norm = Norm(head.norm)
        self.rotary, self.like = head.rotary, weight[:1, : head.shape.hidden_size]

    def join(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._joined is None else self._joined(states)

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self._project(torch.cat([self._embed_norm(embedded), self._state_norm(states)], dim=-1))

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        if self.module.draft_ids is None:
            engine.prepare_unembed(draft_vocab)
        else:
            self._head_of(self.module.draft_ids[:draft_vocab])

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        """See `StateHead`: it chooses among the first so many of its draft ids, or of all where it has none."""
        hidden, ids = self.norm(state), self.module.draft_ids
        if ids is None:
            return engine.unembed(hidden, draft_vocab)
        ids = ids[:draft_vocab]
        found = self._head_of(ids)(hidden)
        logits = found.new_full((len(hidden), self.module.shape.vocab_size), float("-inf"))
        logits[:, ids] = found
        return logits

    def _head_of(self, ids: torch.Tensor) -> Linear:
        if len(ids) not in self._heads:
            own = self._output_embedding
            with torch.inference_mode(mode=False), torch.no_grad():
                bias = None if own.bias is None else own.bias.detach()[ids]
                self._heads[len(ids)] = self._maker.linear([own.weight.detach()[ids]], bias)
        return self._heads[len(ids)]


@dataclass
class LeanText(StateText):
    """See `StateText`."""

    head: LeanHead
    states: torch.Tensor
    """Keys and values, see `Attention.add_to`."""
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        """(1, key heads, positions, head_dim), of `states`."""
        return self.states.narrow(1, 0, self.head.layer.attention.num_keys)

    @property
    def values(self) -> torch.Tensor:
        """The same."""
        return self.states.narrow(1, self.head.layer.attention.num_keys, self.head.layer.attention.num_keys)

    def copied(self, length: int, room: int) -> LeanText:
        """See `StateText`."""
        copy = self.head.new_text(length + room)
        copy.states[:, :, :length] = self.states[:, :, :length]
        return copy

    def run_rows(
        self, x: torch.Tensor, positions: slice | torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `StateText`."""
        layer = self.head.layer
        read, residual = layer.sides(x)
        look = 0, mask, len(x) > 1 and not start
        with over_growing_keys((x.device,)):
            x = layer.attention.add_to(
                residual, read, (self.cos[positions], self.sin[positions]), self.states, start, look
            )
        return self.head.leave(layer.mlp.add_to(x))
