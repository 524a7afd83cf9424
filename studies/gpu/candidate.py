"""The config that the bench step measures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from layerskip.config.decode_config import DecodeConfig


def bench_config(best: DecodeConfig, summary: Mapping[str, Any]) -> DecodeConfig:
    """The exported config; where the search says "do not speculate", its best candidate on held-out prompts.

    A losing setting is worth a row too. Without any candidate that was lossless, the exported config all the same.
    """
    able = [one for one in summary["candidates"] if one["speedup"] is not None and not one["excluded"]]
    if best.speculates or not able:
        return best
    leader = max(able, key=lambda one: float(one["speedup"]))
    config = DecodeConfig.model_validate_json(json.dumps(leader["config"]))
    return config.model_copy(update={"provenance": best.provenance})
