"""What the frozen target says of texts, kept for when a training comes back to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from layerskip.huggingface.memory import machine_bytes
from layerskip.model import LayerSkipModel
from layerskip.training.data import Text

_LIKELIEST = 64
"""Token ids of which a row's probabilities are kept."""
_MOST_BYTES = 4 << 30
"""Of what is kept, and at most a quarter of the machine's memory."""

_Said = tuple[torch.Tensor, ...]
"""Of a text of T + 1 tokens: states (T, depths * hidden), likeliest ids and their probabilities (T, K), the top id."""


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

    Cost of a text: a share of a forward the first time and, where no memory is left for it, every time.
    """

    def __init__(self, model: LayerSkipModel, layers: Sequence[int], draft_ids: torch.Tensor | None) -> None:
        """layers: whose states are read, ascending; draft_ids: (V,) to choose among, None for all."""
        self._model, self._layers, self._draft_ids = model, tuple(layers), draft_ids
        self._known: dict[Text, _Said] = {}
        self._room = min(_MOST_BYTES, (machine_bytes() or 4 * _MOST_BYTES) // 4)

    @torch.no_grad()
    def lesson(self, texts: Sequence[Text]) -> Lesson:
        """Of texts side by side."""
        device = self._model.device
        target: Any = self._model.model
        new = [one for one in dict.fromkeys(texts) if one not in self._known]
        # On a CPU one at a time, so that what is said of a text does not depend on when a training was stopped.
        count = 1 if device.type == "cpu" else len(texts)
        fresh = {text: said for i in range(0, len(new), count) for text, said in self._ask(new[i : i + count])}
        states, ids, probs, top = (
            pad_sequence([one.to(device) for one in parts], batch_first=True)
            for parts in zip(*(fresh[one] if one in fresh else self._known[one] for one in texts), strict=True)
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

    def _ask(self, texts: Sequence[Text]) -> Iterator[tuple[Text, _Said]]:
        """One forward."""
        input_ids = pad_sequence([torch.tensor(one.ids) for one in texts], batch_first=True).to(self._model.device)
        target: Any = self._model.model
        with self._model.adapter.states_of(self._layers) as found:
            logits = target(input_ids=input_ids, use_cache=False).logits
        states = torch.cat([one.to(logits.device) for one in found], dim=-1)
        for row, text in enumerate(texts):
            count = len(text.ids)
            said = (states[row, : count - 1].clone(), *self._likeliest(logits[row, 1:count].float()))
            size = sum(one.nbytes for one in said)
            if size <= self._room:
                self._room -= size
                self._known[text] = tuple(one.cpu() for one in said)
            yield text, said

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(T, K) ids among those to choose among, their probabilities among all, and (T,) the likeliest of all."""
        chosen = logits if self._draft_ids is None else logits[:, self._draft_ids]
        best = chosen.topk(min(_LIKELIEST, chosen.shape[1]), dim=-1)
        probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        return best.indices.int(), probs, logits.argmax(dim=-1)
