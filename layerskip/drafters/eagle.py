"""EagleDrafter: trained weights go on from the target's own hidden states, one decoder layer a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.drafters.base import Draft
from layerskip.drafters.chain import ChainDrafter, WeightsSettings
from layerskip.drafters.eagle_head import EagleHead
from layerskip.engines.lean_layers import Norm, attention_of, mlp_of, rotary_table
from layerskip.engines.linear import Linear, fused
from layerskip.engines.states import StatesEngine
from layerskip.engines.weight_layout import WeightLayouts
from layerskip.huggingface.growing_keys import over_growing_keys
from layerskip.rounds.preparation import Starts
from layerskip.rounds.sampling import Sampler


class LeanEagle:
    """An `EagleHead` for drafting: lean operations on one text's rows, keys and values in buffers of the text's own.

    Cost: a second copy of its matrices, or of most of them, and the measurement of how they should lie.
    """

    def __init__(self, head: EagleHead, output_embedding: Any, fingerprint: str) -> None:
        """output_embedding: the target's; fingerprint: of the weights, see `DraftWeights`."""
        self.module, self.fingerprint = head, fingerprint
        self._output_embedding = output_embedding
        self._heads: dict[int, Linear] = {}
        """By how many of the draft ids they choose among."""
        weight = head.project.weight
        self._make = make = WeightLayouts(weight.device).linear
        with torch.inference_mode(mode=False), torch.no_grad():
            layer: Any = head.layer
            self.attention, self.mlp = attention_of(layer, None, make), mlp_of(layer, make)
            self._project = fused(make, head.project)
            self._joined = fused(make, head.joined) if head.joined is not None else None
            self._embed_norm, self._state_norm = Norm(head.embed_norm), Norm(head.state_norm)
            self.norm = Norm(head.norm)
        self._rotary = head.rotary
        self._like = weight[:1]
        self._cos = self._sin = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """Of the weights, once."""
        return self.module.nbytes

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `EagleShape.aux_layers`."""
        return self.module.shape.aux_layers

    def new_text(self, capacity: int) -> LeanEagleText:
        """A text of up to `capacity` tokens."""
        if len(self._cos) < capacity:
            self._cos, self._sin = rotary_table(self._rotary, self._like, capacity)
        shape = (1, self.attention.num_keys, capacity, self.attention.head_dim)
        return LeanEagleText(self, self._like.new_empty(shape), self._like.new_empty(shape), self._cos, self._sin)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """See `EagleHead.join`; (T, hidden)."""
        return states if self._joined is None else self._joined(states)

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `EagleHead.enter`; (T, hidden)."""
        return self._project(torch.cat([self._embed_norm(embedded), self._state_norm(states)], dim=-1))

    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        """What `logits` then computes with, made before a clock runs."""
        if self.module.draft_ids is None:
            engine.prepare_unembed(draft_vocab)
        else:
            self._head_of(self.module.draft_ids[:draft_vocab])

    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        """(T, V) of what `LeanEagleText.run` gave (T, hidden); -inf but for the ids it chooses among, which are the
        first so many of its draft ids, or of all where it has none."""
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
                self._heads[len(ids)] = self._make(own.weight.detach()[ids], bias)
        return self._heads[len(ids)]


@dataclass
class LeanEagleText:
    """Keys and values (1, heads, capacity, head_dim) of one text."""

    head: LeanEagle
    keys: torch.Tensor
    values: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def copied(self, length: int, room: int) -> LeanEagleText:
        """The same of its first positions, with room for so many more keys and values."""
        copy = self.head.new_text(length + room)
        copy.keys[:, :, :length], copy.values[:, :, :length] = self.keys[:, :, :length], self.values[:, :, :length]
        return copy

    def run(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """The layer over rows (T, hidden) at positions from `start` on, whose keys and values are then those of x."""
        stop, mask = start + len(x), None
        if len(x) > 1 and start:
            places = torch.arange(stop, device=x.device)
            mask = places <= places[start:].unsqueeze(1)
        return self.run_rows(x, slice(start, stop), start, mask)

    def run_rows(
        self, x: torch.Tensor, positions: slice | torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer over rows (R, hidden) at these positions (R,), whose keys and values are kept at `start` and after
        it; mask (R, start + R): which of those kept each row sees, None for rows that follow each other from 0."""
        attention, num_rows = self.head.attention, len(x)
        stop = start + num_rows
        queries, keys, values = attention.project(x, self.cos[positions], self.sin[positions])
        self.keys[0, :, start:stop] = keys.transpose(0, 1)
        self.values[0, :, start:stop] = values.transpose(0, 1)
        with over_growing_keys((x.device,)):
            out = attention.attend(
                queries.transpose(0, 1).unsqueeze(0),
                self.keys[:, :, :stop],
                self.values[:, :, :stop],
                mask,
                is_causal=num_rows > 1 and not start,
            )
        x = attention.out.add_to(x, out[0].transpose(0, 1).reshape(num_rows, -1))
        return self.head.mlp.add_to(x)


class EagleDrafter(ChainDrafter[WeightsSettings]):
    """A chain of up to gamma tokens.

    Cost: of a round, one layer over what the target has emitted since the last one and one layer a further token, and
    the target's output embedding a token; the first round's layer goes over the prompt. Syncs as `ChainDrafter.chain`.
    """

    def __init__(self, head: LeanEagle, engine: StatesEngine, sampler: Sampler, settings: WeightsSettings) -> None:
        super().__init__(sampler, settings)
        self._head, self._engine = head, engine

    def prepare(self, starts: Starts, *, profile: bool) -> None:  # noqa: ARG002 (nothing is recorded)
        self._engine.keep_states(self._head.aux_layers)
        self._head.prepare_unembed(self._engine, self.settings.draft_vocab)

    def begin(self) -> EagleSession:
        return EagleSession(self, self._head, self._engine)


class EagleSession:
    """See `DraftSession`."""

    def __init__(self, drafter: EagleDrafter, head: LeanEagle, engine: StatesEngine) -> None:
        self._drafter, self._head, self._engine = drafter, head, engine
        self._text: LeanEagleText | None = None
        self._num_done = 0
        """Positions whose keys and values come from the target's states."""

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Draft | None:
        """See `DraftSession`. None while the target is unsure, as `target_threshold` says."""
        if limit < 1 or not self._drafter.is_sure(target_prob):
            return None
        engine, place = self._engine, self._engine.cache.length
        state = self._follow(context)

        def next_logits(last: torch.Tensor | None) -> torch.Tensor:
            nonlocal state, place
            if last is not None:
                state = self._run(engine.embed(last), state, place)
                place += 1
            return self._head.logits(engine, state, self._drafter.settings.draft_vocab)

        return self._drafter.chain(context, min(limit, self._drafter.gamma), next_logits)

    def forget_from(self, position: int) -> None:
        """The next round goes over the tokens behind this position, and the states before them, again."""
        self._num_done = min(self._num_done, position)

    def _follow(self, context: Sequence[int]) -> torch.Tensor:
        """Go over what the target has computed since the last round; (1, hidden) of its last position."""
        engine, first, stop = self._engine, self._num_done, self._engine.cache.length
        ids = torch.tensor(context[first + 1 : stop + 1], device=engine.device)
        last = self._run(engine.embed(ids), self._head.join(engine.states[first:stop]), first)[-1:]
        self._num_done = stop
        return last

    @property
    def _room(self) -> int:
        """Keys and values besides those of the text's positions."""
        return 0

    def _run(self, embedded: torch.Tensor, states: torch.Tensor, start: int) -> torch.Tensor:
        if self._text is None:
            self._text = self._head.new_text(self._engine.cache.capacity + self._room)
        return self._text.run(self._head.enter(embedded, states), start)
