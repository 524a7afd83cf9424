"""The lookups that a setting is compared with, and tried by hand: n-grams and suffixes as others set them."""

from __future__ import annotations

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.lookup_settings import PromptLookup, SuffixLookup
from layerskip.config.skip_mask import SkipMask

NUM_TOKENS = 10
"""Most tokens of a proposal: the number that Hugging Face's own documentation uses for its prompt lookup."""
NGRAMS = PromptLookup(min_match=2, max_match=4)
SUFFIXES = SuffixLookup(min_match=2)
"""Factor and least probability are the defaults that vLLM has for its suffix decoding."""


def lookup_alone(
    num_layers: int, lookup: PromptLookup | SuffixLookup, gamma: int = NUM_TOKENS, target_threshold: float = 0.0
) -> DecodeConfig:
    """The target drafts nothing; where the lookup finds nothing it decodes alone."""
    return DecodeConfig(
        drafter=lookup.method,
        skip_mask=SkipMask.none(num_layers),
        gamma=gamma,
        target_threshold=target_threshold,
        lookup=lookup,
    )


def computed_alone(config: DecodeConfig) -> DecodeConfig:
    """The part of a config that computes its drafts, by mask or trained weights. Raises: ValueError if it has none."""
    if not config.computes_drafts:
        raise ValueError(f"drafter: must draft by a mask or weights, got {config.drafter} with gamma {config.gamma}")
    names = ["skip_mask", "gamma", "draft_threshold", "target_threshold", "draft_weights"]
    names += ["siblings", "sibling_threshold"]
    drafter = "layer_skip" if config.draft_weights is None else config.draft_weights.drafter
    return DecodeConfig(**{name: getattr(config, name) for name in names} | {"drafter": drafter})


def lookup_else(config: DecodeConfig, lookup: PromptLookup | SuffixLookup, gamma: int = NUM_TOKENS) -> DecodeConfig:
    """A hybrid: the lookup wherever it finds something, else the config's draft as `computed_alone` has it."""
    # A proposal of a lookup costs nothing but its verification, so it does not wait for a target that is sure.
    own = lookup.model_copy(update={"gamma": gamma, "target_threshold": 0.0})
    return DecodeConfig(**dict(computed_alone(config)) | {"drafter": "hybrid", "lookup": own})
