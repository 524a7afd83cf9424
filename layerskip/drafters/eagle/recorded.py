"""StaticText: the steps of a trained layer as recorded work, one launch each."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch

from layerskip.drafters.chain import WeightsSettings
from layerskip.drafters.eagle.lean import LeanHead, LeanText
from layerskip.engines.cuda_graph.engine import CudaGraphEngine, recorded_sizes, rounded_up
from layerskip.engines.cuda_graph.static_lean import static_layer
from layerskip.engines.cuda_graph.static_step import additive_mask
from layerskip.engines.lean.rotary import rotary_table
from layerskip.engines.states import StatesEngine
from layerskip.rounds.round_work import Piece

Kind = Literal["follow", "step", "branch"]
"""Over what the target has computed, over one drafted token, or over those of a tree."""
_serials = itertools.count()


class _Buffers:
    """What recordings of one trained layer read and write; they outlive texts.

    Memory: keys and values of the engine's positions and of a tree's tokens; logits of as many rows as a level has.
    """

    def __init__(self, head: LeanHead, num_positions: int, num_rows: int) -> None:
        """num_positions: of keys and values; num_rows: most of a step."""
        attention, like = head.layer.attention, head.like
        self.keys_values = like.new_zeros((1, 2 * attention.num_keys, num_positions, attention.head_dim))
        self.rotary = rotary_table(head.rotary, like, num_positions)
        self.ids, self.positions, self.slots = torch.zeros((3, num_rows), dtype=torch.long, device=like.device)
        self.states = like.new_zeros((num_rows, like.shape[1]))
        self.look = like.new_zeros(num_rows * num_positions)
        self.logits: dict[int, torch.Tensor] = {}
        """By rows."""
        self.head, self.num_positions, self.num_rows, self.serial = head, num_positions, num_rows, next(_serials)


class StaticText(LeanText):
    """See `LeanText`. A prompt is gone over as there, as are more rows than a round emits.

    Recorded by the number of rows, in eights with the last one repeated, and of visible positions. What a step gives is
    overwritten by the next.
    """

    def __init__(self, engine: CudaGraphEngine, settings: WeightsSettings, buffers: _Buffers) -> None:
        super().__init__(buffers.head, buffers.keys_values, *buffers.rotary)
        self._engine, self._settings, self._buffers = engine, settings, buffers
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None
        """States that the last step gave, and their logits."""

    @torch.inference_mode()
    def prepare(self, starts: range) -> None:
        """Record what rounds need that begin with so many tokens in the cache, before anything is timed."""
        if not starts:
            return
        gamma, tree_tokens = self._settings.gamma, self._settings.tree_tokens
        for num_rows in recorded_sizes(gamma + 1):
            for num_visible in self._visible_sizes(starts, 0):
                self._engine.prepare_piece(self._piece("follow", num_rows, num_visible))
        places = range(starts[0], starts[-1] + (gamma - 1) * max(1, tree_tokens) + 1)
        if not tree_tokens:
            for num_visible in self._visible_sizes(places, 1):
                self._engine.prepare_piece(self._piece("step", 1, num_visible))
        for num_rows in recorded_sizes(tree_tokens):
            for num_visible in self._visible_sizes(places, num_rows):
                self._engine.prepare_piece(self._piece("branch", num_rows, num_visible))

    def follow(self, engine: StatesEngine, ids: torch.Tensor, first: int) -> torch.Tensor:
        stop, num_rows = first + len(ids), rounded_up(len(ids))
        if num_rows > rounded_up(self._settings.gamma + 1):
            return super().follow(engine, ids, first)
        self._place(self._buffers.ids, ids, num_rows)
        self._place(self._buffers.slots, torch.arange(first, stop, device=ids.device), num_rows)
        return self._play(self._piece("follow", num_rows, self._num_visible(stop)), 1, 1)

    def go_on(self, engine: StatesEngine, ids: torch.Tensor, states: torch.Tensor, place: int) -> torch.Tensor:  # noqa: ARG002
        self._buffers.ids[:1].copy_(ids)
        self._buffers.slots[:1].fill_(place)
        if states.data_ptr() != self._buffers.states.data_ptr():
            self._buffers.states[:1].copy_(states)
        return self._play(self._piece("step", 1, self._num_visible(place + 1)), 1, 1)

    def branch(
        self,
        engine: StatesEngine,  # noqa: ARG002
        ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        slot: int,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        count, stop = mask.shape
        num_rows = rounded_up(count)
        num_visible = self._num_visible(slot + num_rows)
        self._place(self._buffers.ids, ids, num_rows)
        self._place(self._buffers.positions, positions, num_rows)
        self._place(self._buffers.slots, torch.arange(slot, slot + count, device=ids.device), num_rows)
        self._place(self._buffers.states, states, num_rows)
        look = self._buffers.look[: num_rows * num_visible].view(num_rows, num_visible).fill_(float("-inf"))
        look[:count, :stop].masked_fill_(mask, 0.0)
        look[count:] = look[count - 1]
        return self._play(self._piece("branch", num_rows, num_visible), num_rows, count)

    def logits(self, engine: StatesEngine, states: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        if self._given is not None and self._given[0] is states:
            return self._given[1]
        return super().logits(engine, states, draft_vocab)

    def _play(self, piece: Piece, num_given: int, count: int) -> torch.Tensor:
        """States of the first `count` rows of those that it gives."""
        self._engine.play(piece)
        self._given = self._buffers.states[:count], self._buffers.logits[num_given][:count]
        return self._given[0]

    @staticmethod
    def _place(buffer: torch.Tensor, values: torch.Tensor, num_rows: int) -> None:
        count = len(values)
        buffer[:count].copy_(values)
        buffer[count:num_rows] = values[-1]

    def _piece(self, kind: Kind, num_rows: int, num_visible: int) -> Piece:
        """A step over so many rows: of a branch all states and logits are given, else those of the last row."""
        head, vocab, buffers = self.head, self._settings.draft_vocab, self._buffers
        engine: Any = self._engine  # which does what a `StatesEngine` does
        num_given = num_rows if kind == "branch" else 1
        if num_given not in buffers.logits:
            buffers.logits[num_given] = buffers.states.new_zeros((num_given, head.vocab_size))
        ids, slots, states = buffers.ids[:num_rows], buffers.slots[:num_rows], buffers.states[:num_rows]
        positions = buffers.positions[:num_rows] if kind == "branch" else slots
        given, logits = buffers.states[:num_given], buffers.logits[num_given]
        group = head.layer.attention.group

        def work() -> None:
            target = head.join(engine.states.index_select(0, slots)) if kind == "follow" else states
            if kind == "branch":
                seen = buffers.look[: num_rows * num_visible].view(num_rows, num_visible)
                look = seen.repeat(group, 1)
            else:
                look = additive_mask(slots, num_visible, None, states.dtype, repeats=group)
            x = head.enter(engine.embed(ids), target)
            rotary = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
            x = static_layer(head.layer, x, self.states, slots, rotary, look)
            x = head.leave(x[-num_given:])
            logits.copy_(head.logits(engine, x, vocab))
            given.copy_(x)

        return Piece(("eagle", buffers.serial, kind, num_rows, num_visible, vocab), work, (given,))

    def _num_visible(self, num_positions: int) -> int:
        return self._engine.num_visible_for(num_positions, self.states.shape[2])

    def _visible_sizes(self, starts: range, num_tokens: int) -> list[int]:
        return self._engine.visible_sizes(starts, num_tokens, self.states.shape[2])


def static_text(head: LeanHead, engine: CudaGraphEngine, settings: WeightsSettings) -> StaticText:
    """For the running session; its buffers are those of all texts, unless it needs larger ones."""
    num_positions = rounded_up(engine.cache.num_positions + settings.room)  # kernels like eights
    num_rows = rounded_up(max(settings.gamma + 1, settings.tree_tokens))
    known = engine.beside_cache.get(head.fingerprint)
    if known is None or known.head is not head or known.num_positions < num_positions or known.num_rows < num_rows:
        with torch.inference_mode():
            known = engine.beside_cache[head.fingerprint] = _Buffers(head, num_positions, num_rows)
    return StaticText(engine, settings, known)
