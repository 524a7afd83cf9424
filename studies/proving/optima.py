"""The true optimum of every model at every machine's prices, worked out once and kept beside the readings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.config.skip_mask import SkipMask
from studies.proving.costs import COSTS
from studies.proving.table import Table
from studies.proving.truth import Optimum, optima_of, worth_of_tuning_optima

FILE = "optima.json"
_NUMBERS = ("speedup", "share_faster", "on_tuning")
_FIELDS = ("gamma", "draft_threshold", "target_threshold")


def table_names(folder: Path, suffix: str) -> list[str]:
    """Models whose tables lie in this folder."""
    return sorted(file.name.removesuffix(suffix) for file in folder.glob(f"*{suffix}"))


def known_optima(
    folder: Path, tables: dict[str, Table], *, saves: bool = False, tell: Callable[[str], None] = lambda _name: None
) -> dict[str, dict[str, Optimum]]:
    """By model and cost table: read from the folder's file, or enumerated where table or prices are others since.

    saves: write what was enumerated into the file. `tell` is called with a model's name before it is enumerated. Cost:
    see `optima_of`, for each model that the file has not. Raises: ValueError naming the file if it cannot be read.
    """
    file = folder / FILE
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file}: not optima in JSON, delete it to enumerate them anew: {error}") from None
    found = {}
    for name, table in tables.items():
        key = fingerprint_of(table)
        if stored.get(name, {}).get("fingerprint") != key:
            tell(name)
            prices = {one.name: one.prices(name, table.space.num_layers) for one in COSTS.values()}
            tuned = worth_of_tuning_optima(table, prices)
            optima = {
                one: replace(best, on_tuning=tuned[one])
                for one, best in optima_of(table, prices, table.reporting).items()
            }
            stored[name] = {"fingerprint": key, "optima": {one: _to_json(best) for one, best in optima.items()}}
            if saves:
                write_atomically(file, json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
        found[name] = {one: _from_json(best) for one, best in stored[name]["optima"].items()}
    return found


_NO_TABLE_HAS = ("weights_s", "int8_s")
"""Prices of."""


def fingerprint_of(table: Table) -> str:
    """Of all that the optima follow from: readings, which texts report, and prices. What no table has, trained draft
    weights, fewer token ids, weights of fewer bits and siblings, is left out of space and prices."""
    prices = [
        {name: value for name, value in asdict(one).items() if name not in _NO_TABLE_HAS} for one in COSTS.values()
    ]
    digest = hashlib.sha256(json.dumps(prices, sort_keys=True).encode())
    space = repr(table.space)
    absent = ("draft_weights=()", "draft_vocabs=()", "int8=False", "int4=False", "siblings_max=0", "trees=()")
    for one in absent:
        space = space.replace(f", {one}", "")
    digest.update(f"({space}, {table.num_tuning!r}, {table.reporting!r})".encode())
    digest.update(table.codes.tobytes() + table.target_levels.tobytes())
    return digest.hexdigest()[:16]


def _to_json(best: Optimum) -> dict[str, Any]:
    config = {name: getattr(best.config, name) for name in _FIELDS}
    numbers = {name: round(getattr(best, name), 6) for name in _NUMBERS}
    return numbers | {"skip_mask": str(best.config.skip_mask)} | config


def _from_json(data: dict[str, Any]) -> Optimum:
    config = DecodeConfig(skip_mask=SkipMask.parse(data["skip_mask"]), **{name: data[name] for name in _FIELDS})
    return Optimum(config, **{name: data[name] for name in _NUMBERS})
