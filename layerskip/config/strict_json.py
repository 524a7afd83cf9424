"""Strict JSON: what is read from files says each thing once, and fails in one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_MAX_DIGITS = 400
"""More than any field holds. Python itself refuses 4,300, with advice for programmers."""
_HALF = re.compile(r"[\ud800-\udfff]")
_MAY_HOLD_HALVES = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """The value of a JSON text. Refused are a field that is given twice, and half of a surrogate pair, which JSON can
    write and no encoding can; numbers that are not finite are the schema's to refuse.

    Whole numbers of very many digits become infinity, so that the schema names their field.
    Raises: ValueError in one line, also for what is nested too deeply.
    """
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_refuse_duplicates)
        if _MAY_HOLD_HALVES.search(text):
            _refuse_halves(value, "not valid JSON")
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None


def in_six_digits(value: Any) -> Any:
    """The same JSON value with floating-point numbers of six digits: they are measured, and no clock has more."""
    if isinstance(value, Mapping):
        return {name: in_six_digits(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_six_digits(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def printable(name: object) -> str:
    """A field's name as one short line, whatever the file calls it."""
    text = str(name)[:80]
    return text if text and text.isprintable() else ascii(text)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{printable(name)}: is given twice")
        values[name] = value
    return values


def _refuse_halves(value: object, field: str) -> None:
    if isinstance(value, str) and _HALF.search(value):
        raise ValueError(f"{field}: must be text, got half of a surrogate pair in {printable(value)}")
    if isinstance(value, list):
        for one in value:
            _refuse_halves(one, field)
    if isinstance(value, dict):
        for name, one in value.items():
            _refuse_halves(name, field)
            _refuse_halves(one, printable(name))


def _integer(text: str) -> float:
    return int(text) if len(text) <= _MAX_DIGITS else math.inf
