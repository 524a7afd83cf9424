"""A decode config in a few words, for lines, tables and figures."""

from __future__ import annotations

from pathlib import Path

from layerskip.config.decode_config import DecodeConfig, DraftWeights
from layerskip.config.lookup_settings import SuffixLookup


def describe(config: DecodeConfig) -> str:
    """A config in a few words."""
    if config.lossy is not None:
        return f"LOSSY {config.lossy.name}: {describe(config.model_copy(update={'lossy': None}))}"
    if not config.speculates:
        return "plain decoding"
    if config.lookup is None:
        return _describe_computed(config)
    lookup = f"{config.lookup.method} of {config.lookup.min_match} or more tokens, gamma {config.lookup_gamma}"
    if isinstance(config.lookup, SuffixLookup):
        lookup += f", factor {config.lookup.factor:g}, min_probability {config.lookup.min_probability:g}"
    if config.lookup_target_threshold:
        lookup += f", target_threshold {config.lookup_target_threshold:g}"
    if config.drafter != "hybrid":
        return lookup
    return f"{lookup}; else {_describe_computed(config)}"


def beside_skipping(mask: str) -> str:
    """What a mask in text form says besides the sublayers that it skips: of its token ids and bits."""
    return " ".join(one for one in mask.partition(":")[2].split(",") if one.startswith(("v", "int")))


def name_weights(weights: DraftWeights) -> str:
    """What drafts, and by which folder's weights where that is not the model's own."""
    return weights.drafter + ("" if weights.drafter == "mtp" else f" {Path(weights.path).name}")


def _describe_computed(config: DecodeConfig) -> str:
    weights = config.draft_weights
    by = f"mask {config.skip_mask}" if weights is None else name_weights(weights)
    if weights is not None and weights.draft_vocab is not None:
        by += f", draft_vocab {weights.draft_vocab}"
    if config.tree_tokens:
        by += f", tree of {config.tree_tokens}"
    text = f"{by}, gamma {config.gamma}"
    if config.draft_threshold:
        text += f", draft_threshold {config.draft_threshold:g}"
    if config.target_threshold:
        text += f", target_threshold {config.target_threshold:g}"
    if config.siblings:
        where = "each" if config.sibling_threshold == 1.0 else f"where below {config.sibling_threshold:g}"
        text += f", {config.siblings} sibling{'s' if config.siblings > 1 else ''} {where}"
    return text
