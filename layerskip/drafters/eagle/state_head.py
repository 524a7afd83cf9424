"""StateHead: goes on from the target's hidden states a token at a time, and StateText: one text under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from layerskip.engines.states import StatesEngine


class StateHead(ABC):
    """Hidden state of a position and the token after it -> hidden state whose logits are of the token after that.

    On a position that the target has computed it takes the target's states, on a drafted one its own.
    """

    fingerprint: str
    """Of its weights, see `DraftWeights`."""
    aux_layers: tuple[int, ...] = ()
    """Layers of the target, ascending and counted from 0, whose states are read before the last one's."""

    module: nn.Module
    """What holds its weights."""
    vocab_size: int
    """Of the target."""

    @property
    def nbytes(self) -> int:
        """Of the weights, once."""
        return sum(one.nbytes for one in self.module.parameters())

    @abstractmethod
    def new_text(self, capacity: int) -> StateText:
        """A text of up to `capacity` tokens."""

    @abstractmethod
    def join(self, states: torch.Tensor) -> torch.Tensor:
        """(T, hidden) of the target's states (T, depths * hidden) as `StatesEngine` keeps them."""

    @abstractmethod
    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(T, hidden): what the layer goes on from, of next tokens' embeddings and hidden states."""

    @abstractmethod
    def prepare_unembed(self, engine: StatesEngine, draft_vocab: int | None) -> None:
        """What `logits` then computes with, made before a clock runs."""

    @abstractmethod
    def logits(self, engine: StatesEngine, state: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        """(T, V) of what `StateText.run` gave (T, hidden); -inf but for the ids it chooses among."""

    def rollouts(self, states: torch.Tensor, embedded: torch.Tensor, depth: int, first: int) -> list[torch.Tensor]:
        """What the positions of a known text from `first` on give as draft step 0, 1, ... `depth` of a round:
        (T - first, hidden) each, as `StateText.run` gives it. Position t of step d is drafted behind the target's
        states up to t - d and the head's own after it; of no use are those below first + d.

        Shapes: states (T, depths * hidden), of positions 0..T-1; embedded (T, embedding), of the tokens at 1..T. Cost:
        depth + 1 layers over these rows, attention (T - first) x T.
        """
        count, num_rows = len(states), len(states) - first
        # Keys of step d are kept behind those of the steps before, as a tree's are.
        text = self.new_text(count + depth * num_rows)
        found = [text.run(self.enter(embedded, self.join(states)), 0)[first:]]
        rows = torch.arange(first, count, device=states.device).unsqueeze(1)
        places, own = torch.arange(count, device=states.device), torch.arange(num_rows, device=states.device)
        for d in range(1, depth + 1):
            # Position t has seen the target's states up to t - d, and behind those one drafted row of each step since.
            seen = [places <= rows - d, *(own == rows - first - (d - step) for step in range(1, d + 1))]
            x = self.enter(embedded[first:], F.pad(found[-1], (0, 0, 1, 0))[:-1])
            found.append(text.run_rows(x, slice(first, count), count + (d - 1) * num_rows, torch.cat(seen, dim=1)))
        return found


class StateText(ABC):
    """Keys and values (1, heads, capacity, head_dim) of one text."""

    head: Any

    @property
    @abstractmethod
    def keys(self) -> torch.Tensor:
        """The buffer itself."""

    @property
    @abstractmethod
    def values(self) -> torch.Tensor:
        """The same."""

    def follow(self, engine: StatesEngine, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Over positions from `first` on that the target has computed, with the tokens after them, ids (T,).

        Returns: (1, hidden) of the last one.
        """
        states = self.head.join(engine.states[first : first + len(ids)])
        return self.run(self.head.enter(engine.embed(ids), states), first)[-1:]

    def go_on(self, engine: StatesEngine, ids: torch.Tensor, states: torch.Tensor, place: int) -> torch.Tensor:
        """Over one drafted token, ids (1,), after the state (1, hidden) at `place`; (1, hidden)."""
        return self.run(self.head.enter(engine.embed(ids), states), place)

    def branch(
        self,
        engine: StatesEngine,
        ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        slot: int,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Over drafted tokens (R,) of a tree after states (R, hidden); else as `run_rows`."""
        return self.run_rows(self.head.enter(engine.embed(ids), states), positions, slot, mask)

    def logits(self, engine: StatesEngine, states: torch.Tensor, draft_vocab: int | None) -> torch.Tensor:
        """See `StateHead.logits`; states: what one of these gave last."""
        logits: torch.Tensor = self.head.logits(engine, states, draft_vocab)
        return logits

    def run(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """The layer over rows (T, hidden) at positions from `start` on, whose keys and values are then those of x."""
        stop, mask = start + len(x), None
        if len(x) > 1 and start:
            places = torch.arange(stop, device=x.device)
            mask = places <= places[start:].unsqueeze(1)
        return self.run_rows(x, slice(start, stop), start, mask)

    @abstractmethod
    def run_rows(
        self, x: torch.Tensor, positions: slice | torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer over rows (R, hidden) at these positions (R,), whose keys and values are kept at `start` and after
        it; mask (R, start + R): which of those kept each row sees, None for rows that follow each other from 0."""

    @abstractmethod
    def copied(self, length: int, room: int) -> StateText:
        """The same of its first positions, with room for so many more keys and values."""
