"""DraftTree: drafted tokens of several branches in one verification: where they stand, what they see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from layerskip.huggingface.kv_cache import first_visible


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
    def depths(self) -> list[int]:
        """Of each row, how many it goes on from."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def paths(self) -> torch.Tensor:
        """(R, R) boolean: which rows each sees."""
        paths = torch.eye(self.num_rows, dtype=torch.bool)
        for row, parent in enumerate(self.parents, 1):
            paths[row] |= paths[parent]
        return paths

    def positions(self, start: int, device: torch.device) -> torch.Tensor:
        """(R,) int64, the last emitted token standing at `start`."""
        return start + torch.tensor(self.depths, device=device)

    def table(self, size: int) -> torch.Tensor:
        """(size, 2 + size) int64: of each row how far its position and its place lie behind those of the first, and
        which rows it sees, as ones. Rows beyond the tree's are its last one again."""
        last = self.num_rows - 1
        rows = torch.arange(size).clamp(max=last)
        table = torch.zeros((size, 2 + size), dtype=torch.long)
        table[:, 0], table[:, 1] = torch.tensor(self.depths)[rows], rows
        table[:, 2 : 3 + last] = self.paths[rows]
        return table

    def visible(self, start: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(R, keys) boolean: which keys each row sees. The keys are those of the cache from the first position that any
        row sees, and after them those of the rows."""
        first = first_visible(start, window)
        before = torch.arange(first, start, device=device)
        seen = torch.cat([before.new_ones(self.num_rows, len(before)).bool(), self.paths.to(device)], dim=1)
        if window is None:
            return seen
        own = self.positions(start, device)
        return seen & (torch.cat([before, own]) > own.unsqueeze(1) - window)
