"""PrefixStates: hidden states that drafting computed exactly and verification need not compute again."""

from __future__ import annotations

import torch

from layerskip.config.skip_mask import SkipMask


class PrefixStates:
    """Hidden states (T, hidden) after the first `depth` layers, of one round's tokens in order.

    A draft that keeps its first `depth` layers whole runs them as the target does. So a draft step adds what they gave
    (`add`), and the verification starts at layer `depth` for those tokens; keys and values of the layers below are in
    the cache already. Only the last draft token, which no draft step has read, still goes through all layers.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth: must be at least 1, got {depth}")
        self.depth = depth
        self._rows: list[torch.Tensor] = []

    @classmethod
    def of(cls, mask: SkipMask) -> PrefixStates | None:
        """For drafts under this mask; None where it skips part of layer 0, or nothing at all is left to skip."""
        depth = mask.num_kept_first
        return cls(depth) if 0 < depth < mask.num_layers else None

    def add(self, states: torch.Tensor) -> None:
        """Keep (T, hidden) of the next tokens."""
        self._rows.append(states)

    @property
    def num_tokens(self) -> int:
        return sum(len(rows) for rows in self._rows)

    def all(self) -> torch.Tensor:
        """(num_tokens, hidden)."""
        return torch.cat(self._rows)
