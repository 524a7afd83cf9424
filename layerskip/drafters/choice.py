"""The drafter that a config names."""

from __future__ import annotations

from typing import cast

from layerskip.config.decode_config import DecodeConfig, DraftWeights
from layerskip.drafters.base import Drafter
from layerskip.drafters.chain import WeightsSettings
from layerskip.drafters.draft_model import DraftModel, DraftModelDrafter
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.drafters.eagle.drafter import EagleDrafter
from layerskip.drafters.eagle.tree import EagleTreeDrafter
from layerskip.drafters.hybrid import HybridDrafter
from layerskip.drafters.layer_skip import LayerSkipDrafter, LayerSkipSettings
from layerskip.drafters.lookups.drafter import LookupDrafter
from layerskip.drafters.lookups.text_store import TextStore
from layerskip.drafters.other_tokenizer import OtherTokenizerDrafter
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
        by_weights = _by_weights(config.draft_weights, config, engine, sampler)
        return by_weights if lookup is None else HybridDrafter(lookup, by_weights)
    settings = LayerSkipSettings(
        config.gamma,
        config.draft_threshold,
        config.target_threshold,
        config.siblings,
        config.sibling_threshold,
        skip_mask=config.skip_mask,
    )
    asks = lookup is not None and lookup.needs_target_prob
    layer_skip = LayerSkipDrafter(engine, sampler, settings, with_prob=True if asks else None)
    return layer_skip if lookup is None else HybridDrafter(lookup, layer_skip)


def _by_weights(
    weights: DraftWeights, config: DecodeConfig, engine: Engine, sampler: Sampler
) -> EagleDrafter | DraftModelDrafter | OtherTokenizerDrafter:
    settings = WeightsSettings(
        config.gamma,
        config.draft_threshold,
        config.target_threshold,
        config.siblings,
        config.sibling_threshold,
        draft_vocab=weights.draft_vocab,
        tree_tokens=weights.tree_tokens or 0,
    )
    found = loaded_weights(engine, weights)
    if isinstance(found, DraftModel):
        if found.translation is not None:
            return OtherTokenizerDrafter(found, found.translation, sampler, settings)
        return DraftModelDrafter(found, sampler, settings)
    # Not checked by its class: a benchmark wraps engines to time their forwards.
    make = EagleDrafter if weights.tree_tokens is None else EagleTreeDrafter
    return make(found, cast(StatesEngine, engine), sampler, settings)
