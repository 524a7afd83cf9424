"""Event: one fact that a run tells, with its words for people (`lines`) and its fields for scripts (`fields`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from layerskip.config.decode_config import DecodeConfig


@dataclass(frozen=True)
class Line:
    """One line for people: the name of its phase in front (None: no name, no indent), the style on a terminal."""

    text: str
    phase: str | None = None
    style: str | None = None

    def __str__(self) -> str:
        return self.text if self.phase is None else f"{self.phase:<9} {self.text}"


class Event:
    """Base of all. `fields` are JSON values, though numbers may not be finite; keys are never left out."""

    name: str

    def lines(self) -> list[Line]:
        """As the plain view prints it."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """As the JSON view writes it, beside `event`, the name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Told(Event):
    """An event that no view looks into: its words and fields, ready made."""

    name: str
    said: Sequence[Line]
    facts: Mapping[str, Any]

    def lines(self) -> list[Line]:
        return list(self.said)

    def fields(self) -> dict[str, Any]:
        return dict(self.facts)


@dataclass(frozen=True)
class Note(Event):
    """A remark in words alone. Further lines of the text stand under the first, without the phase."""

    name = "note"
    phase: str | None
    text: str

    def lines(self) -> list[Line]:
        indent = None if self.phase is None else ""
        first, *rest = self.text.split("\n")
        return [Line(first, self.phase), *(Line(one, indent) for one in rest)]


@dataclass(frozen=True)
class Warned(Event):
    """What must not be overlooked."""

    name = "warning"
    text: str

    def lines(self) -> list[Line]:
        return [Line(self.text, style="bold red")]


@dataclass(frozen=True)
class Stopped(Warned):
    """The run ends without a result, and why."""

    name = "stopped"


def config_fields(config: DecodeConfig) -> dict[str, Any]:
    """A config, flat."""
    names = ["drafter", "gamma", "draft_threshold", "target_threshold", "siblings", "sibling_threshold"]
    flat = {"skip_mask": str(config.skip_mask)} | {name: getattr(config, name) for name in names}
    weights = {}
    if config.draft_weights is not None:
        weights = {"draft_weights": config.draft_weights.path, "tree_tokens": config.tree_tokens}
    return flat | weights | {"lookup": None if config.lookup is None else config.lookup.model_dump(exclude_none=True)}
