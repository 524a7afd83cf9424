"""Folders of weights that draft: what lies in one, and what was loaded from it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.eagle import LeanEagle
from layerskip.drafters.eagle_head import CONFIG_NAME, describe_eagle, read_config

_SAMPLED = 2**20
"""Bytes at the beginning of a file of weights, where its tensors are listed, and at its end."""


def describe_weights(folder: Path) -> DraftWeights:
    """What lies in a folder: trained draft weights, or a whole model that drafts. Nothing is loaded.

    Cost: of a model, two megabytes read of each of its files. Raises: ValueError or OSError naming the file.
    """
    if "architectures" not in read_config(folder):
        return describe_eagle(folder)[0]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"draft_weights: {folder} has a model's {CONFIG_NAME}, and no weights (*.safetensors)")
    return DraftWeights(
        drafter="draft_model", path=str(folder), fingerprint=_fingerprint([folder / CONFIG_NAME, *files])
    )


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


def loaded_weights(engine: Any, weights: DraftWeights) -> LeanEagle | DraftModel:
    """What was loaded of them for the model of this engine. Raises: ValueError if nothing was."""
    known: dict[str, LeanEagle | DraftModel] = getattr(engine, "draft_weights", {})
    if weights.path not in known:
        raise ValueError(f"draft_weights: {weights.path} is not loaded; `LayerSkipModel.check_config` loads it")
    return known[weights.path]


def check_same_tokens(target: Any, draft: Any, name: str) -> None:
    """Raises: ValueError unless both tokenizers give the same pieces the same ids; one that a model lacks is not
    looked at."""
    if target is None or draft is None:
        return
    own, other = target.get_vocab(), draft.get_vocab()
    if own == other:
        return
    piece = min(own.items() ^ other.items(), key=lambda one: one[1])[0]
    raise ValueError(
        f"draft_weights: {name} must have the model's own tokenizer; {piece!r} is {_id_of(piece, other)} there and "
        f"{_id_of(piece, own)} here"
    )


def _id_of(piece: str, vocabulary: dict[str, int]) -> str:
    return f"token {vocabulary[piece]}" if piece in vocabulary else "no token"
