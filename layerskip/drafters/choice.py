"""The drafter that a config names."""

from __future__ import annotations

from layerskip.config.decode_config import DecodeConfig
from layerskip.drafters.base import Drafter
from layerskip.drafters.hybrid import HybridDrafter
from layerskip.drafters.layer_skip import LayerSkipDrafter, LayerSkipSettings
from layerskip.drafters.lookup import LookupDrafter
from layerskip.drafters.text_store import TextStore
from layerskip.engines import Engine
from layerskip.rounds.sampling import Sampler


def make_drafter(
    config: DecodeConfig, engine: Engine, sampler: Sampler, store: TextStore | None = None
) -> Drafter | None:
    """None for plain decoding.

    store: earlier texts that a suffix drafter may look into.
    """
    if not config.speculates:
        return None
    lookup = None
    if config.lookup is not None:
        lookup = LookupDrafter(config.lookup, config.lookup_gamma, config.lookup_target_threshold, store)
    if lookup is not None and config.drafter != "hybrid":
        return lookup
    settings = LayerSkipSettings(
        config.skip_mask,
        config.gamma,
        config.draft_threshold,
        config.target_threshold,
        config.share_prefix,
    )
    asks = lookup is not None and lookup.needs_target_prob
    layer_skip = LayerSkipDrafter(engine, sampler, settings, with_prob=True if asks else None)
    return layer_skip if lookup is None else HybridDrafter(lookup, layer_skip, continues=config.continue_lookup)
