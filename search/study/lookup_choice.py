"""LookupChoice: how tokens are looked up, and when, apart from the mask that they may be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.lookup_settings import LookupSettings, PromptLookup, SuffixLookup
from layerskip.config.usual_lookups import lookup_alone

_LOOKUP: TypeAdapter[PromptLookup | SuffixLookup] = TypeAdapter(LookupSettings)


@dataclass(frozen=True)
class LookupChoice:
    """A lookup with its own gamma and threshold, whether it drafts alone or in a hybrid."""

    settings: PromptLookup | SuffixLookup
    """Without a gamma and a threshold of their own."""
    gamma: int
    target_threshold: float = 0.0

    @classmethod
    def of(cls, config: DecodeConfig) -> LookupChoice | None:
        """A config's; None if it looks nothing up."""
        if config.lookup is None:
            return None
        return cls(_bare(config.lookup), config.lookup_gamma, config.lookup_target_threshold)

    def alone(self, num_layers: int) -> DecodeConfig:
        """The config that does nothing but look up."""
        return lookup_alone(num_layers, self.settings, self.gamma, self.target_threshold)

    def in_hybrid(self) -> PromptLookup | SuffixLookup:
        """The `lookup` of a hybrid's config."""
        return self.settings.model_copy(update={"gamma": self.gamma, "target_threshold": self.target_threshold})


def write_choice(choice: LookupChoice | None) -> dict[str, Any] | None:
    """As JSON values."""
    return None if choice is None else choice.in_hybrid().model_dump()


def read_choice(data: dict[str, Any] | None) -> LookupChoice | None:
    """The inverse of `write_choice`. Raises: ValueError if it cannot be read."""
    if data is None:
        return None
    lookup = _LOOKUP.validate_python(data)
    return LookupChoice(_bare(lookup), lookup.gamma or 1, lookup.target_threshold or 0.0)


def _bare(lookup: PromptLookup | SuffixLookup) -> PromptLookup | SuffixLookup:
    return lookup.model_copy(update={"gamma": None, "target_threshold": None})
