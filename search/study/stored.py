"""Stored: a dataclass that a study keeps as one line of JSON among its attributes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Stored:
    """Base of such dataclasses. Fields that have a default may be missing in what is read, none may be unknown."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def to_json(self: DataclassInstance) -> str:
        """One line, for a study's attributes."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return TypeAdapter(cls).validate_json(text)
