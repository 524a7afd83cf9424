"""How tokens are looked up in text; part of a decode config."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from layerskip.config.validated import MAX_GAMMA, Frozen, OneLineErrors, Probability

MAX_MATCH = 64
"""Longest match that is told apart from a longer one."""

MatchLength = Annotated[int, Field(ge=1, le=MAX_MATCH)]


class _Lookup(OneLineErrors, Frozen):
    """What every lookup has."""

    min_match: MatchLength
    """Tokens that must have stood before a place as they do at the end of the text; fewer are no match."""
    gamma: Annotated[int, Field(ge=1, le=MAX_GAMMA)] | None = None
    """Most tokens of a proposal; None is the config's own."""
    target_threshold: Probability | None = None
    """As the config's, for lookups; None is the config's own."""

    def __str__(self) -> str:
        """The method and every field that was set: `suffix, min_match 2, factor 2.0`."""
        fields = self.model_dump(exclude_defaults=True)
        method = getattr(self, "method", "lookup")
        return ", ".join([method, *(f"{name} {value}" for name, value in fields.items())])


class PromptLookup(_Lookup):
    """What followed the last tokens the last time, or most often."""

    method: Literal["prompt_lookup"] = "prompt_lookup"
    max_match: MatchLength
    """Of longer matches only so many tokens count, so that the most recent of them is taken."""
    continuation: Literal["recent", "frequent"] = "recent"

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_match < self.min_match:
            raise ValueError(f"max_match: must be at least min_match, {self.min_match}, got {self.max_match}")
        return self


class SuffixLookup(_Lookup):
    """What most of the places with the longest match go on with, as far as the match warrants."""

    method: Literal["suffix"] = "suffix"
    factor: Annotated[float, Field(gt=0.0, le=64.0, allow_inf_nan=False)] = 1.0
    """Tokens proposed for each token matched, at most."""
    min_probability: Probability = 0.1
    """A proposal ends where the share of places that agree with it falls below this."""


LookupSettings = Annotated[PromptLookup | SuffixLookup, Field(discriminator="method")]
