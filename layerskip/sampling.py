"""Logits -> probabilities -> token: the one place where temperature, top-k, top-p and the penalty act."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip.sampling_params import SamplingParams as SamplingParams


class Sampler:
    """Shapes logits and draws tokens for one run; draft and target use the same one.

    `generator` must live on the logits' device; None uses torch's global one, as `generate` does.
    """

    def __init__(self, params: SamplingParams, generator: torch.Generator | None = None) -> None:
        self.params = params
        self.greedy = not params.do_sample
        self._generator = generator
        self._penalty = (
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty) if params.repetition_penalty != 1.0 else None
        )
        self._warpers = [] if self.greedy else _warpers(params)

    def shape(self, logits: torch.Tensor, context: Sequence[int], drafted: torch.Tensor | None = None) -> torch.Tensor:
        """Penalised and warped float32 logits.

        Shapes: logits (T, V); row i follows `context` plus the first i tokens of `drafted` (T - 1,), so the penalty of
        a draft position sees the draft tokens before it. Returns (T, V) float32.
        Cost: one device sync with a penalty and drafted tokens, else none.
        """
        scores = logits.float()
        if self._penalty is not None:
            drafted_ids = [] if drafted is None else drafted.tolist()
            scores = self._penalty(self._seen_ids(context, drafted_ids, scores), scores)
        for warper in self._warpers:
            # The ids are not read by these warpers; the penalty is the only one that looks at the text.
            scores = warper(None, scores)
        return scores

    @staticmethod
    def _seen_ids(context: Sequence[int], drafted: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """(T, len(context) + T - 1): row i holds context + drafted[:i], padded by a token it holds already."""
        rows = [[*context, *drafted[:i], *([context[-1]] * (len(drafted) - i))] for i in range(scores.shape[0])]
        return torch.tensor(rows, device=scores.device)

    def go_on_from(self, other: Sampler) -> None:
        """Draw from now on what `other` would draw. Nothing to do for two that draw from one generator, or greedily."""
        if self._generator is not None and other._generator is not None:
            self._generator.set_state(other._generator.get_state())

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """One token per row of `probs` (T, V) -> (T,) int64."""
        return torch.multinomial(probs, 1, generator=self._generator).squeeze(-1)

    def uniform(self, num: int, device: torch.device) -> torch.Tensor:
        """(num,) float32 in [0, 1)."""
        return torch.rand(num, generator=self._generator, device=device)

    def fill_noise(self, uniform: torch.Tensor, *exponential: torch.Tensor) -> None:
        """Fresh numbers in place, uniform in [0, 1) and exponential with mean 1, for draws made without a generator."""
        uniform.uniform_(generator=self._generator)
        for noise in exponential:
            noise.exponential_(generator=self._generator)


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """(1,): the largest softmax probability of a row (1, V), which a `draft_threshold` looks at."""
    return (logits.max() - logits.logsumexp(-1)).exp()


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """In `generate`'s order."""
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers
