"""Prompt groups: where a record names its group, which groups there are, and whether each has prompts enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

from layerskip.config.decode_config import GROUP_NAME_RULE, MAX_GROUPS, is_group_name

MIN_IN_GROUP = 2
"""Tuning prompts, and held-out prompts, of each group: one prompt tells nothing of the others."""


@dataclass(frozen=True)
class Grouping:
    """Where a prompt's group is written."""

    field: str = "category"
    """Field of a record."""
    required: bool = False
    """Whether to refuse prompts without a valid group, and to split off held-out prompts group by group."""

    def read(self, record: Mapping[str, Any], source: str) -> str | None:
        """The group of a prompt's record; None if what stands there is no name for one.

        Raises: ValueError naming `source` and the field if a group is required.
        """
        value = record.get(self.field)
        if is_group_name(value):
            return value
        if self.required:
            got = f"{str(value)[:80]!a}" if self.field in record else "no such field"
            raise ValueError(f"{source}: {self.field}: --per-group: {GROUP_NAME_RULE}, got {got}")
        return None


NO_GROUPS = Grouping()


class Grouped(Protocol):
    """A prompt, encoded or not."""

    @property
    def group(self) -> str | None: ...


P = TypeVar("P", bound=Grouped)


def count_groups(tuning: Sequence[Grouped], held_out: Sequence[Grouped]) -> dict[str, tuple[int, int]]:
    """Tuning and held-out prompts of every group, in the order in which groups first appear.

    Raises: ValueError if there are not 2 to 64 groups, or one has fewer than 2 tuning or 2 held-out prompts.
    """
    num_tuning, num_held_out = (Counter(one.group for one in some if one.group) for some in (tuning, held_out))
    counts = {name: (num_tuning[name], num_held_out[name]) for name in num_tuning | num_held_out}
    if not 2 <= len(counts) <= MAX_GROUPS:
        names = f" ({', '.join(counts)})" if len(counts) == 1 else ""
        raise ValueError(f"--per-group: needs 2 to {MAX_GROUPS} groups of prompts, got {len(counts)}{names}")
    for name, (tuned, held) in counts.items():
        if min(tuned, held) < MIN_IN_GROUP:
            raise ValueError(
                f"--per-group: group {name!r} needs at least {MIN_IN_GROUP} tuning and {MIN_IN_GROUP} held-out "
                f"prompts, got {tuned} and {held}"
            )
    return counts


def of_group(prompts: Sequence[P], name: str | None) -> tuple[P, ...]:
    """The prompts of one group."""
    return tuple(prompt for prompt in prompts if prompt.group == name)


def interleaved(prompts: Sequence[P]) -> tuple[P, ...]:
    """The same prompts, one of each group in turn, so that any first few are of all groups."""
    names = dict.fromkeys(prompt.group for prompt in prompts)
    columns = [[prompt for prompt in prompts if prompt.group == name] for name in names]
    return tuple(prompt for row in zip_longest(*columns) for prompt in row if prompt is not None)
