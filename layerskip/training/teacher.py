"""What the frozen target says of texts, kept for when a training comes back to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from layerskip.model import LayerSkipModel
from layerskip.training.data import Text

_LIKELIEST = 64
"""Token ids of which a row's probabilities are kept."""
_MOST_BYTES = 4 << 30
"""Of what is kept, and at most a quarter of the machine's memory."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """Texts side by side (B), with a row (T) for every token but the last: its state, the token after it, and what the
    target says comes next."""

    states: torch.Tensor
    """(B, T, depths * hidden) float32, of the target's layers that are read."""
    embedded: torch.Tensor
    """(B, T, E) float32: the tokens after."""
    ids: torch.Tensor
    """(B, T, K): the likeliest of those to choose among."""
    probs: torch.Tensor
    """(B, T, K) float32: theirs, of all ids'."""
    top: torch.Tensor
    """(B, T): the likeliest of all ids."""
    first: torch.Tensor
    """(B, 1): the row that a text's first draft is made from."""
    counts: torch.Tensor
    """(B, 1): rows of each text."""

    def drafts(self, depth: int) -> torch.Tensor:
        """(B, T) bool: the rows that give the draft token so deep in a round."""
        rows = torch.arange(self.top.shape[1], device=self.top.device)
        return (rows >= self.first + depth) & (rows < self.counts)


class Teacher:
    """The target over the texts of a training.

    Cost of a text: a forward over it the first time and, where no memory is left for it, every time. One text at a
    time, so that what is said of it does not depend on the others, nor on when a training was stopped.
    """

    def __init__(self, model: LayerSkipModel, layers: Sequence[int], draft_ids: torch.Tensor | None) -> None:
        """layers: whose states are read, ascending; draft_ids: (V,) to choose among, None for all."""
        self._model, self._layers, self._draft_ids = model, tuple(layers), draft_ids
        self._known: dict[Text, tuple[torch.Tensor, ...]] = {}
        self._room = min(_MOST_BYTES, _memory_bytes() // 4)

    @torch.no_grad()
    def lesson(self, texts: Sequence[Text]) -> Lesson:
        device, target = self._model.device, self._target
        said = [self._known.get(one) or self._ask(one) for one in texts]
        states, ids, probs, top = (
            pad_sequence([one.to(device) for one in parts], batch_first=True) for parts in zip(*said, strict=True)
        )
        after = pad_sequence([torch.tensor(one.ids[1:], device=device) for one in texts], batch_first=True)
        return Lesson(
            states=states.float(),
            embedded=F.embedding(after, target.get_input_embeddings().weight).float(),
            ids=ids.long(),
            probs=probs,
            top=top,
            first=torch.tensor([[max(0, one.given - 1)] for one in texts], device=device),
            counts=torch.tensor([[len(one.ids) - 1] for one in texts], device=device),
        )

    @property
    def _target(self) -> Any:
        return self._model.model

    def _ask(self, text: Text) -> tuple[torch.Tensor, ...]:
        """States, the likeliest ids and their probabilities, and the likeliest one of all."""
        with self._model.adapter.states_of(self._layers) as found:
            input_ids = torch.tensor([text.ids], device=self._model.device)
            logits = self._target(input_ids=input_ids, use_cache=False).logits[0, 1:].float()
        states = torch.cat([one.to(logits.device)[0, :-1] for one in found], dim=-1)
        chosen = logits if self._draft_ids is None else logits[:, self._draft_ids]
        best = chosen.topk(min(_LIKELIEST, chosen.shape[1]), dim=-1)
        probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        said = (states, best.indices.int(), probs, logits.argmax(dim=-1))
        size = sum(one.nbytes for one in said)
        if size <= self._room:
            self._room -= size
            self._known[text] = tuple(one.cpu() for one in said)
        return said


def _memory_bytes() -> int:
    """Of this machine; what is kept where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return _MOST_BYTES
