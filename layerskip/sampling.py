"""Logits -> probabilities -> token: the one place where temperature, top-k, top-p and the penalty act."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Generation settings that would change the output and that this loop does not apply. Refused, never ignored.
_UNSUPPORTED_WHEN_SET = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "penalty_alpha": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "max_time": None,
}


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits. Same meaning and order as in Hugging Face's `generate`.

    Greedy (`do_sample=False`) ignores temperature, top_k, top_p and min_p, not the repetition penalty.
    """

    do_sample: bool = False
    temperature: float = 1.0
    """Above 0; lower is sharper."""
    top_k: int = 50
    """Keep the k likeliest tokens; 0 = off. 50 is what `generate` uses where nobody says otherwise."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this probability, in (0, 1]; 1 = off."""
    min_p: float = 0.0
    """Keep tokens at least this share of the likeliest one's probability, in [0, 1]; 0 = off."""
    repetition_penalty: float = 1.0
    """Above 0; tokens already in the text get their logit divided (or multiplied, if negative) by it; 1 = off."""

    def __post_init__(self) -> None:
        rules = (
            (
                "temperature",
                0 < self.temperature < math.inf,
                "must be above 0 (use do_sample=False for greedy) and finite",
            ),
            ("top_k", self.top_k >= 0 and self.top_k % 1 == 0, "must be a whole number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "must be in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be above 0 and finite"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}: {rule}, got {getattr(self, name)}")

    @classmethod
    def from_generation_config(cls, generation_config: Any, **overrides: Any) -> SamplingParams:
        """The model's own generation defaults under the caller's arguments (None = not given), as `generate` does.

        Raises: ValueError if the generation config asks for something that changes the output and is not supported.
        """
        for name, neutral in _UNSUPPORTED_WHEN_SET.items():
            value = getattr(generation_config, name, None)
            if value is not None and value != neutral:
                raise ValueError(f"generation_config.{name}: not supported by this decoder, got {value!r}")
        settings: dict[str, Any] = {}
        for field in fields(cls):
            value = overrides.get(field.name)
            if value is None:
                value = getattr(generation_config, field.name, None)
            if value is not None:
                settings[field.name] = value
        return cls(**settings)


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
