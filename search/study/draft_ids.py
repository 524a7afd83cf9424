"""Which token ids drafts under a mask choose among, where they choose among few: those that the model itself holds
likeliest on the tuning texts. Tokenizers number their pieces by other rules.

Ref: FR-Spec (2502.14856) takes those that are frequent in a corpus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.draft_ids import name_of, pack_ids, unpack_ids
from search.study.attributes import DRAFT_IDS


def likeliest_sets(shares: NDArray[Any], sizes: Sequence[int]) -> dict[str, str]:
    """Of each of these sizes the packed set of the token ids with the largest shares (V,), by name."""
    order = np.argsort(-shares, kind="stable")
    packed = [pack_ids(order[:size].tolist()) for size in sizes]
    return {name_of(one): one for one in packed}


def sets_in(facts: Mapping[str, Any]) -> dict[str, str]:
    """Those that a study, or what is kept of one, names; by name. None where it keeps none."""
    kept = facts.get(DRAFT_IDS) or {}
    found: dict[str, str] = json.loads(kept) if isinstance(kept, str) else dict(kept)
    return found


def by_size(sets: Mapping[str, str]) -> tuple[tuple[int, str], ...]:
    """Their names, by how many token ids they hold; see `SearchSpace.draft_ids`."""
    return tuple(sorted((len(unpack_ids(packed)), name) for name, packed in sets.items()))


def used_by(configs: Sequence[DecodeConfig], sets: Mapping[str, str]) -> dict[str, str] | None:
    """Those of the sets that these configs' masks name; None where they name none."""
    names = {setting.skip_mask.draft_ids for config in configs for _, setting in config.named_settings()}
    return {name: packed for name, packed in sets.items() if name in names} or None


def with_sets(config: DecodeConfig, sets: Mapping[str, str]) -> DecodeConfig:
    """The config with those that its masks name, ready to be saved."""
    return config.model_copy(update={DRAFT_IDS: used_by([config], sets)})
