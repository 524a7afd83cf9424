"""Folders of weights that draft: what lies in one, and what was loaded from it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DraftWeights, TrainedDrafter
from layerskip.config.hub import WEIGHTS_FILES, is_hub_id, locate_weights
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle.head import CONFIG_NAME, describe_eagle, read_config
from layerskip.drafters.eagle.published import is_published
from layerskip.drafters.eagle.state_head import StateHead

_SAMPLED = 2**20
"""Bytes at the beginning of a file of weights, where its tensors are listed, and at its end."""


def describe_weights(name: str | os.PathLike[str]) -> DraftWeights:
    """What lies in a folder or in a repository of the hub: trained draft weights, or a whole model that drafts. Nothing
    is loaded; from the hub it is downloaded, where the cache does not have it.

    Cost: of a model, two megabytes read of each of its files. Raises: ValueError or OSError naming the file.
    """
    text = os.fspath(name)
    folder = locate_weights(text)
    config = read_config(folder)
    if "architectures" not in config:
        weights = describe_eagle(folder)[0]
    else:
        drafter: TrainedDrafter = "eagle" if is_published(config) else "draft_model"
        if drafter != "eagle" and "speculators_model_type" in config:
            kind = config["speculators_model_type"]
            raise ValueError(f"draft_weights: {folder}: speculators_model_type must be eagle3, got {kind}")
        files = sorted(file for pattern in WEIGHTS_FILES for file in folder.glob(pattern))
        if not files:
            raise ValueError(
                f"draft_weights: {folder} has a model's {CONFIG_NAME}, and no weights ({', '.join(WEIGHTS_FILES)})"
            )
        fingerprint = _fingerprint([folder / CONFIG_NAME, *files])
        weights = DraftWeights(drafter=drafter, path=str(folder), fingerprint=fingerprint)
    return weights.model_copy(update={"path": text if is_hub_id(text) else str(folder.absolute())})


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for one in files:
        with one.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            digest.update(f"{one.name} {size} ".encode() + file.read(_SAMPLED))
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()[:16]


def loaded_weights(engine: Any, weights: DraftWeights) -> StateHead | DraftModel:
    """What was loaded of them for the model of this engine. Raises: ValueError if nothing was."""
    known: dict[str, StateHead | DraftModel] = getattr(engine, "draft_weights", {})
    if weights.path not in known:
        raise ValueError(f"draft_weights: {weights.path} is not loaded; `LayerSkipModel.check_config` loads it")
    return known[weights.path]


def other_tokens(target: Any, draft: Any) -> str | None:
    """A piece that two tokenizers give different ids, in words; None where there is none, or no tokenizer to ask."""
    if target is None or draft is None:
        return None
    own, other = target.get_vocab(), draft.get_vocab()
    if own == other:
        return None
    piece = min(own.items() ^ other.items(), key=lambda one: one[1])[0]
    return f"{piece!r} is {_id_of(piece, other)} there and {_id_of(piece, own)} here"


def has_other_tokenizer(engine: Any, weights: DraftWeights) -> bool:
    """Whether what was loaded of them for the model of this engine is a draft model with another tokenizer."""
    found = loaded_weights(engine, weights)
    return isinstance(found, DraftModel) and found.translation is not None


def _id_of(piece: str, vocabulary: dict[str, int]) -> str:
    return f"token {vocabulary[piece]}" if piece in vocabulary else "no token"
