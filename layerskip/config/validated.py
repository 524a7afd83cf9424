"""What every validated value shares: the frozen base, common field types, and the error in one line."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layerskip.config.strict_json import printable

MAX_GAMMA = 64
"""A bound on what a config file can make us allocate."""
MAX_DRAFTING = 2
"""Texts decoded at once that still draft, where it was not measured: among how many that pays differs by model, and
among two it lost for none (`python -m studies.engine.batches`)."""

Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Frozen(BaseModel):
    """Cannot be changed, refuses unknown fields, converts nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OneLineErrors(BaseModel):
    """Raises: ValueError in one line, naming every field that broke a rule, the rule and the value got."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ValueError(describe_validation_error(error)) from None


def without(data: object, retired: Container[str]) -> object:
    """What a validator is given, less the fields that files from before may have and that decide nothing any more."""
    return {name: value for name, value in data.items() if name not in retired} if isinstance(data, dict) else data


def describe_validation_error(error: ValidationError) -> str:
    """One line: every field that broke a rule, the rule and the value got."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(printable(part) for part in item["loc"] if part != "[key]")
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown field"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "union_tag_invalid":  # whose message repeats what it got, however long
            named = item["ctx"]
            message = f"{named['discriminator']} must be one of {named['expected_tags']}, got {_short(named['tag'])!r}"
        elif item["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, got {_short(item['input'])!r}"
        lines.append(f"{field}: {message}" if field and not message.startswith(f"{field}:") else message)
    return "; ".join(lines)


def _short(value: object) -> str:
    try:
        return str(value)[:80]
    except ValueError:  # a whole number of more digits than Python writes
        return "a number of thousands of digits"
