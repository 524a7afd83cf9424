"""What is subtracted from logits for what the text has said, and what a request adds to them whatever it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from layerskip.config.sampling_params import SamplingParams


class Penalties:
    """The repetition, presence and frequency penalty of one text."""

    def __init__(self, params: SamplingParams) -> None:
        self._repetition = params.repetition_penalty
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self.begin(0)

    def begin(self, place: int) -> None:
        """A prompt of so many tokens is about to be continued."""
        self._in_text, self._said = _Counted(0), _Counted(place)

    def settle(self, place: int) -> None:
        """The tokens before `place` are chosen for good."""
        self._in_text.num_settled = self._said.num_settled = place

    def apply(self, scores: torch.Tensor, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """A copy of scores (T, V) in which row i has what follows `context` and the first i of `drafted`, each row's
        numbers the same as if it were the only one. Cost: some operations, and two for each drafted token."""
        left = scores.clone()
        if (penalty := self._repetition) != 1.0:
            for first, counts in _by_row(self._in_text.of(context), drafted):
                own = scores[first:, list(counts)]
                left[first:, list(counts)] = torch.where(own < 0, own * penalty, own / penalty)
        if self._presence or self._frequency:
            scores = scores if penalty == 1.0 else left.clone()
            for first, counts in _by_row(self._said.of(context), drafted):
                less = [self._presence + self._frequency * count for count in counts.values()]
                left[first:, list(counts)] = scores[first:, list(counts)] - scores.new_tensor(less)
        return left


class _Counted:
    """How often a text that grows says each token id from `start` on; what is settled of it is gone over once."""

    def __init__(self, start: int) -> None:
        self.num_settled = self._start = self._num_known = start
        self._known = Counter[int]()

    def of(self, text: Sequence[int]) -> Counter[int]:
        """All of them."""
        if len(text) < self._num_known:
            return Counter(text[self._start :])
        settled = min(self.num_settled, len(text))
        self._known.update(text[self._num_known : settled])
        self._num_known = max(self._num_known, settled)
        found = self._known.copy()
        found.update(text[self._num_known :])
        return found


def _by_row(counts: Counter[int], drafted: Sequence[int]) -> Iterator[tuple[int, Mapping[int, int]]]:
    """From which row on which token ids have been said how often; of others it is as in the rows before."""
    if counts:
        yield 0, counts
    more = Counter[int]()
    for row, token in enumerate(drafted, start=1):
        more[token] += 1
        yield row, {token: counts[token] + more[token]}


@dataclass(frozen=True)
class LogitEdits:
    """What a request changes of logits besides: as `sequence_bias` and `min_new_tokens` of `generate` do."""

    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, before any penalty."""
    min_new_tokens: int = 0
    """Before so many new tokens none of these is possible:"""
    ends: frozenset[int] = frozenset()

    def check(self, vocab_size: int) -> None:
        """Raises: ValueError for a bias of what is no token id."""
        outside = next((one for one in self.bias if not 0 <= one < vocab_size), None)
        if outside is not None:
            raise ValueError(f"logit_bias: token ids must be in 0..{vocab_size - 1}, got {outside}")

    def apply(self, scores: torch.Tensor, num_new: int) -> torch.Tensor:
        """Scores (T, V), of whose rows the first follows so many new tokens, and each of the others one more than the
        row before; a copy where anything is changed."""
        early = max(0, self.min_new_tokens - num_new)
        if self.bias or early:
            scores = scores.clone()
            scores[:, list(self.bias)] += scores.new_tensor(list(self.bias.values()))
            scores[:early, list(self.ends)] = float("-inf")
        return scores
