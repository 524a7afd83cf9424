"""The interface between proposing and verifying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.engines.prefix import PrefixStates


@dataclass(frozen=True)
class Draft:
    """Proposed tokens. Shapes: ids (G,) int64; probs (G, V) float32, or None when greedy. G may be below gamma."""

    ids: torch.Tensor
    probs: torch.Tensor | None


class Drafter(Protocol):
    """Proposes the tokens after a context. Must leave the cache length where it found it."""

    def propose(self, context: Sequence[int], gamma: int, prefix: PrefixStates | None = None) -> Draft:
        """Between 1 and `gamma` tokens after `context`, whose last token is not in the cache yet.

        Into `prefix` goes what the verification may reuse of the forwards over `context[-1]` and all drafts but the
        last.
        """
        ...
