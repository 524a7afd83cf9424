"""The drafter that a config names."""

from __future__ import annotations

from typing import cast

from layerskip.config.decode_config import DecodeConfig
from layerskip.drafters.base import Drafter
from layerskip.drafters.eagle import EagleDrafter, EagleSettings, LeanEagle
from layerskip.drafters.hybrid import HybridDrafter
from layerskip.drafters.layer_skip import LayerSkipDrafter, LayerSkipSettings
from layerskip.drafters.lookup import LookupDrafter
from layerskip.drafters.text_store import TextStore
from layerskip.engines import Engine
from layerskip.engines.states import StatesEngine
from layerskip.rounds.sampling import Sampler


def make_drafter(
    config: DecodeConfig, engine: Engine, sampler: Sampler, store: TextStore | None = None
) -> Drafter | None:
    """None for plain decoding.

    store: earlier texts that a suffix drafter may look into.
    Raises: ValueError for draft weights on an engine that cannot serve them, or that were not loaded.
    """
    if not config.speculates:
        return None
    lookup = None
    if config.lookup is not None:
        lookup = LookupDrafter(config.lookup, config.lookup_gamma, config.lookup_target_threshold, store)
    if lookup is not None and config.drafter != "hybrid":
        return lookup
    if config.draft_weights is not None:
        eagle = _make_eagle(config, engine, sampler)
        return eagle if lookup is None else HybridDrafter(lookup, eagle)
    settings = LayerSkipSettings(
        config.skip_mask,
        config.gamma,
        config.draft_threshold,
        config.target_threshold,
        config.share_prefix,
    )
    asks = lookup is not None and lookup.needs_target_prob
    layer_skip = LayerSkipDrafter(engine, sampler, settings, with_prob=True if asks else None)
    return (
        layer_skip
        if lookup is None
        else HybridDrafter(lookup, layer_skip, continues=layer_skip if config.continue_lookup else None)
    )


def _make_eagle(config: DecodeConfig, engine: Engine, sampler: Sampler) -> EagleDrafter:
    weights = config.draft_weights
    # Not by its class: a benchmark wraps engines to time their forwards.
    heads: dict[str, LeanEagle] | None = getattr(engine, "draft_heads", None)
    if weights is None or heads is None:
        raise ValueError(f"draft_weights: need the engine eager or fused, got {engine.name}")
    if weights.path not in heads:
        raise ValueError(f"draft_weights: {weights.path} is not loaded; `LayerSkipModel.check_config` loads it")
    settings = EagleSettings(config.gamma, config.draft_threshold, config.target_threshold)
    return EagleDrafter(heads[weights.path], cast(StatesEngine, engine), sampler, settings)
