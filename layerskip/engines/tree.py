"""DraftTree: drafted tokens of several branches in one verification: where they stand, what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from layerskip.engines.base import Engine
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.kv_cache import first_visible
from layerskip.huggingface.rounding import logit_difference


@dataclass(frozen=True)
class DraftTree:
    """Rows of a verification: the last emitted token, and drafted tokens, each of which goes on from a row before it. A
    row stands one position behind the one that it goes on from, and sees what that sees, and itself.
    """

    parents: tuple[int, ...]
    """Of each row after the first, the row that it goes on from."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.parents)

    @cached_property
    def _depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def positions(self, start: int, device: torch.device) -> torch.Tensor:
        """(R,) int64, the last emitted token standing at `start`."""
        return start + torch.tensor(self._depths, device=device)

    def visible(self, start: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(R, keys) boolean: which keys each row sees. The keys are those of the cache from the first position that any
        row sees, and after them those of the rows."""
        first = first_visible(start, window)
        paths = torch.eye(self.num_rows, dtype=torch.bool)
        for row, parent in enumerate(self.parents, 1):
            paths[row] |= paths[parent]
        before = torch.arange(first, start, device=device)
        seen = torch.cat([before.new_ones(self.num_rows, len(before)).bool(), paths.to(device)], dim=1)
        if window is None:
            return seen
        own = self.positions(start, device)
        return seen & (torch.cat([before, own]) > own.unsqueeze(1) - window)


@runtime_checkable
class TreeEngine(Protocol):
    """An engine that verifies several branches at once."""

    def verify_tree(self, input_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """Logits (R, V) of the whole model for the tree's rows; the cache advances by R, in the order of the rows."""
        ...

    def keep_rows(self, sources: Sequence[int], place: int) -> None:
        """What rows left at these positions of the cache, ascending, stands at `place` and after it from now on."""
        ...


_CONTEXT, _TREE = 5, DraftTree((0, 1, 2, 0, 0, 2, 2, 7, 7))
"""A chain of three, two beside its first and two beside its last, of which the latter is gone on from twice."""


def tree_refusal(engine: Engine, adapter: ModelAdapter) -> str | None:
    """Why siblings and trees cannot be verified on this engine or model; None where they can.

    Cost: a dozen forwards over a few tokens, whose logits are compared. Positions that a model takes from the order of
    its keys (ALiBi) make them differ.
    """
    if not isinstance(engine, TreeEngine):
        return f"the engine eager or fused, got {engine.name}"
    try:
        same = _matches_chains(engine, adapter)
    except Exception as error:  # noqa: BLE001 (an architecture may refuse a mask of ours in any way it likes)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"a model that can be told its tokens' positions and what each sees, got {reason}"
    rule = "a model that can be told its tokens' positions and what each sees"
    return None if same else f"{rule}, this one then gives other logits"


@torch.inference_mode()
def _matches_chains(engine: Any, adapter: ModelAdapter) -> bool:
    """Whether the rows of a tree say what ordinary forwards over their paths say, the step after a sibling included."""
    tree, generator = _TREE, torch.Generator().manual_seed(0)
    vocabulary = int(adapter.text_config.vocab_size)
    ids = torch.randint(vocabulary, (_CONTEXT + tree.num_rows,), generator=generator).to(adapter.device)
    context, rows = ids[:_CONTEXT], ids[_CONTEXT:]
    paths = [[0]]
    for row, parent in enumerate(tree.parents, 1):
        paths.append([*paths[parent], row])
    expected = []
    for after in (rows[:0], context[:1]):
        for path in paths if not len(after) else paths[-1:]:
            with engine.session(len(ids) + 1):
                engine.forward(context)
                expected.append(engine.forward(torch.cat([rows[path], after])).clone())
    with engine.session(len(ids)):
        engine.forward(context)
        found = engine.verify_tree(rows, tree).clone()
        kept = paths[-1][1:]
        engine.keep_rows([_CONTEXT + row for row in kept], _CONTEXT + 1)
        engine.cache.rollback_to(_CONTEXT + 1 + len(kept))
        last = engine.forward(context[:1])
        difference, tolerance = logit_difference(torch.cat([found, last]), torch.cat(expected))
    return difference <= tolerance
