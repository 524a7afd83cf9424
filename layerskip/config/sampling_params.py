"""SamplingParams: how a token is chosen from logits, as plain numbers; without torch, which takes seconds to import."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

LEAST_TEMPERATURE = 0.001
"""Below it probabilities run out of numbers."""

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
    "num_return_sequences": 1,
    "dola_layers": None,
    "token_healing": False,
    "constraints": None,
    "force_words_ids": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "max_time": None,
}


def asks_to_sample(
    temperature: float | None, top_p: float | None, top_k: int | None, min_p: float | None
) -> bool | None:
    """Whether these fields, None where not given, ask to sample, for greedy (False) or for neither (None).

    Whoever shapes the distribution without naming a temperature wants to draw from it; a temperature of 0 is greedy.
    """
    if temperature is not None:
        return temperature > 0
    return True if (top_p or 1.0) < 1.0 or top_k or min_p else None


NOT_OF_GENERATE = ("presence_penalty", "frequency_penalty")
"""Fields that Hugging Face's `generate` does not have; where a generation config has them it ignores them."""


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits. Same meaning and order as in Hugging Face's `generate`; the two penalties that
    it does not have as in OpenAI's API and vLLM.

    Greedy (`do_sample=False`) ignores temperature, top_k, top_p and min_p, not the penalties.
    """

    do_sample: bool = False
    temperature: float = 1.0
    """At least 0.001; lower is sharper."""
    top_k: int = 50
    """Keep the k likeliest tokens; 0 = off. 50 is what `generate` uses where nobody says otherwise."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this probability, in (0, 1]; 1 = off."""
    min_p: float = 0.0
    """Keep tokens at least this share of the likeliest one's probability, in [0, 1]; 0 = off."""
    repetition_penalty: float = 1.0
    """Above 0; tokens already in the text get their logit divided (or multiplied, if negative) by it; 1 = off."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logit of every token said behind the prompt; 0 = off."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; the same for each time that it was said; 0 = off."""

    def __post_init__(self) -> None:
        least = LEAST_TEMPERATURE if self.do_sample else 0.0
        rules: dict[str, tuple[Callable[[Any], bool], str]] = {
            "temperature": (
                lambda one: least <= one < math.inf,
                f"must be at least {LEAST_TEMPERATURE} (use do_sample=False for greedy) and finite",
            ),
            "top_k": (lambda one: one >= 0 and one % 1 == 0, "must be a whole number of at least 0"),
            "top_p": (lambda one: 0 < one <= 1, "must be in (0, 1]"),
            "min_p": (lambda one: 0 <= one <= 1, "must be in [0, 1]"),
            "repetition_penalty": (lambda one: 0 < one < math.inf, "must be above 0 and finite"),
            "presence_penalty": (lambda one: -2 <= one <= 2, "must be in [-2, 2]"),
            "frequency_penalty": (lambda one: -2 <= one <= 2, "must be in [-2, 2]"),
        }
        for name, (holds, rule) in rules.items():
            value = getattr(self, name)
            if not (isinstance(value, Real) and holds(value)):
                raise ValueError(f"{name}: {rule}, got {value!r}")

    @property
    def penalises(self) -> bool:
        """Whether what is likely depends on what was said."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @classmethod
    def from_generation_config(cls, generation_config: Any, **overrides: Any) -> SamplingParams:
        """The model's own generation defaults under the caller's arguments (None = not given), as `generate` does.

        Raises: ValueError if the generation config asks for something that changes the output and is not supported.
        """
        for name, neutral in _UNSUPPORTED_WHEN_SET.items():
            value = getattr(generation_config, name, None)
            if value is not None and value != neutral and value not in ([], {}):
                raise ValueError(f"generation_config.{name}: not supported by this decoder, got {value!r}")
        settings: dict[str, Any] = {}
        for field in fields(cls):
            value = overrides.get(field.name)
            if value is None and field.name not in NOT_OF_GENERATE:
                value = getattr(generation_config, field.name, None)
            if value is not None:
                settings[field.name] = value
        return cls(**settings)
