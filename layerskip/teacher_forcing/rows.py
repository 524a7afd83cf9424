"""Which keys a teacher-forced row sees: the target's before its round, the draft's own since."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerskip.teacher_forcing.base import ForcedText


@dataclass(frozen=True)
class RowGeometry:
    """The rows of one text, (depth + 1) x T of them, d by d; all tensors on the rows' device."""

    ids: torch.Tensor
    """(R,): input token of each row."""
    positions: torch.Tensor
    """(R,): its position in the text."""
    depths: torch.Tensor
    """(R,): how many tokens its round has drafted before it."""

    @classmethod
    def of(cls, text: ForcedText, depth: int, device: torch.device) -> RowGeometry:
        """All rows of a text up to `depth`."""
        count = len(text.continuation_ids)
        start = len(text.prompt_ids)
        return cls(
            ids=torch.tensor(text.continuation_ids, device=device).repeat(depth + 1),
            positions=torch.arange(start, start + count, device=device).repeat(depth + 1),
            depths=torch.arange(depth + 1, device=device).repeat_interleave(count),
        )

    def sees_target(self, num_keys: int, window: int | None) -> torch.Tensor:
        """(R, num_keys) boolean: the target's keys of the positions before the row's round."""
        keys = torch.arange(num_keys, device=self.positions.device)
        positions = self.positions.unsqueeze(1)
        seen = keys < positions - self.depths.unsqueeze(1)
        return seen if window is None else seen & (keys > positions - window)

    def sees_rows(self, window: int | None) -> torch.Tensor:
        """(R, R) boolean: the row itself and the rows of the same round before it."""
        rounds = self.positions - self.depths  # where a row's round starts
        same = rounds.unsqueeze(1) == rounds
        seen = same & (self.depths <= self.depths.unsqueeze(1))
        return seen if window is None else seen & (self.positions > self.positions.unsqueeze(1) - window)
