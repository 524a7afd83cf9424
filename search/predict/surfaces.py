"""Predicted speedup over gamma and draft_threshold around the leading configs, kept in the study."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import optuna

from layerskip.config.decode_config import DecodeConfig
from search.predict.predictor import Predictor
from search.study.attributes import SURFACES
from search.study.leaderboard import Entry


def store_surfaces(study: optuna.Study, predictor: Predictor, entries: Sequence[Entry]) -> None:
    """Keep the surfaces around those of these configs that skip layers alone, for whichever is exported.

    Cost: a reading per mask that is not known any more, some ten milliseconds and about a kilobyte each.
    """
    found: list[dict[str, Any]] = []
    for config in (one.config for one in entries if one.config.drafter == "layer_skip"):
        if any(_place(config).items() <= one.items() for one in found):
            continue
        gammas, thresholds, speedups = predictor.surface(config)
        found.append(
            {
                **_place(config),
                "gammas": [int(one) for one in gammas],
                "draft_thresholds": [round(float(one), 3) for one in thresholds],
                "speedups": [[round(float(one), 4) for one in row] for row in speedups],
            }
        )
    study.set_user_attr(SURFACES, json.dumps(found, separators=(",", ":")))


def surface_around(stored: str | None, config: DecodeConfig) -> dict[str, Any] | None:
    """The kept surface that this config lies on; None if there is none.

    Its `speedups` (gammas, draft thresholds) are predicted, geometric means over the tuning texts.
    """
    if config.drafter != "layer_skip":
        return None
    for one in json.loads(stored or "[]"):
        if _place(config).items() <= one.items():
            return dict(one)
    return None


def _place(config: DecodeConfig) -> dict[str, Any]:
    """What a surface does not vary."""
    names = {"target_threshold", "siblings", "sibling_threshold"}
    return {"skip_mask": str(config.skip_mask), **config.model_dump(include=names)}
