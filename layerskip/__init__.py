"""Decode a causal language model with itself as its own drafter: same tokens, fewer seconds."""

from typing import TYPE_CHECKING, Any

from layerskip.config.decode_config import Confirmed, DecodeConfig, GroupSetting, Provenance, RegimeSetting
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.config.lossy_acceptance import ProbabilityAcceptance, TypicalAcceptance
from layerskip.config.sampling_regime import Sampling
from layerskip.config.skip_mask import SkipMask
from layerskip.decoding.stats import DecodeStats

if TYPE_CHECKING:
    from layerskip.decoding.prefix_cache import PrefixCache
    from layerskip.drafters import TextStore
    from layerskip.interop.generate import CustomGenerate, custom_generate
    from layerskip.model import GenerateOutput, LayerSkipModel, StreamPiece
    from layerskip.rounds.grammar import Grammar

__all__ = [
    "Confirmed",
    "CustomGenerate",
    "DecodeConfig",
    "DecodeStats",
    "GenerateOutput",
    "Grammar",
    "GroupSetting",
    "LayerSkipModel",
    "PrefixCache",
    "ProbabilityAcceptance",
    "PromptLookup",
    "Provenance",
    "RegimeSetting",
    "Sampling",
    "SkipMask",
    "StreamPiece",
    "SuffixLookup",
    "TextStore",
    "TypicalAcceptance",
    "custom_generate",
]


def __getattr__(name: str) -> Any:
    # Importing torch and transformers takes seconds; reading a config or `--help` should not.
    if name in ("GenerateOutput", "LayerSkipModel", "StreamPiece"):
        from layerskip import model

        return getattr(model, name)
    if name == "Grammar":
        from layerskip.rounds.grammar import Grammar

        return Grammar
    if name == "PrefixCache":
        from layerskip.decoding.prefix_cache import PrefixCache

        return PrefixCache
    if name == "TextStore":
        from layerskip.drafters import TextStore

        return TextStore
    if name in ("CustomGenerate", "custom_generate"):
        from layerskip.interop import generate as hugging_face

        return getattr(hugging_face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
