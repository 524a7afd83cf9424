"""Texts, and which keys a teacher-forced row of one sees: the target's before its round, the draft's own since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MOST_RANK = 255
"""Of the text's token among those that a draft chooses from; stands for all that are more."""
ChooseNext = Callable[[torch.Tensor, Sequence[int]], tuple[int, float]]
"""The token chosen from logits (1, V) after continuation tokens, and the top probability."""


@dataclass(frozen=True)
class ForcedText:
    """A prompt and the target's own continuation of it."""

    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]
    seed: int = 0
    """Of the random numbers that a sampled continuation was drawn by."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.continuation_ids:
            raise ValueError(
                "text: prompt and continuation must hold at least one token each, got "
                f"{len(self.prompt_ids)} and {len(self.continuation_ids)}"
            )

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.continuation_ids


@dataclass(frozen=True)
class RowGeometry:
    """Draft steps on one text; all tensors on the rows' device, (R,) int64."""

    ids: torch.Tensor
    """Input token of each row."""
    positions: torch.Tensor
    """Its position in the text."""
    depths: torch.Tensor
    """How many tokens its round has drafted before it."""
    rounds: torch.Tensor
    """Which round it belongs to."""

    @classmethod
    def of(cls, text: ForcedText, depth: int, device: torch.device) -> RowGeometry:
        """Every place of the continuation up to `depth` tokens into a round, (depth + 1) x T rows, d by d."""
        count = len(text.continuation_ids)
        start = len(text.prompt_ids)
        positions = torch.arange(start, start + count, device=device).repeat(depth + 1)
        depths = torch.arange(depth + 1, device=device).repeat_interleave(count)
        ids = torch.tensor(text.continuation_ids, device=device).repeat(depth + 1)
        return cls(ids, positions, depths, rounds=positions - depths)

    @classmethod
    def from_lists(
        cls, ids: list[int], positions: list[int], depths: list[int], rounds: list[int], device: torch.device
    ) -> RowGeometry:
        """Rows one by one."""
        return cls(*(torch.tensor(one, dtype=torch.long, device=device) for one in (ids, positions, depths, rounds)))

    def sees_target(self, num_keys: int, window: int | None) -> torch.Tensor:
        """(R, num_keys) boolean: the target's keys of the positions before the row's round."""
        keys = torch.arange(num_keys, device=self.positions.device)
        positions = self.positions.unsqueeze(1)
        seen = keys < positions - self.depths.unsqueeze(1)
        return seen if window is None else seen & (keys > positions - window)

    def sees_rows(self, window: int | None) -> torch.Tensor:
        """(R, R) boolean: the row itself and the rows of the same round before it."""
        same = self.rounds.unsqueeze(1) == self.rounds
        seen = same & (self.depths <= self.depths.unsqueeze(1))
        return seen if window is None else seen & (self.positions > self.positions.unsqueeze(1) - window)
