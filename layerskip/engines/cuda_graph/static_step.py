"""The interface of a forward in static form: tensors in, tensors out, nothing in it that changes from run to run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.growing_keys import additive
from layerskip.huggingface.kv_cache import StaticCache

MIN_VISIBLE = 256
"""Smallest number of positions that a recorded step attends to."""


@dataclass(frozen=True)
class Branches:
    """Of tokens that do not simply follow each other, on the device: where they are kept, and what they see."""

    slots: torch.Tensor
    """(T,) int64: the cache's places of their keys and values, the first before the others."""
    seen: torch.Tensor
    """(T, T) boolean: which of the places from the first on each token sees."""

    def look(self, keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the keys at these places (K,) tokens at `positions` (T,) see, (T, K) boolean; and the keys' own
        positions (K,)."""
        place = keys - self.slots[:1]
        is_before, at = place < 0, place.clamp(0, len(positions) - 1)
        seen = self.seen.index_select(1, at) & (place < len(positions))
        return is_before | seen, torch.where(is_before, keys, positions.index_select(0, at))


class StaticExecutor(Protocol):
    """Runs one model over a `StaticCache`, in static form and in the ordinary one."""

    vocab_size: int
    logits_dtype: torch.dtype

    @property
    def num_compilations(self) -> int:
        """Functions compiled so far. Each takes seconds, so a timed region must not raise it."""
        ...

    @property
    def attention_backend(self) -> str:
        """What computes attention in `step`."""
        ...

    def use(self, cache: StaticCache) -> None:
        """Make the buffers that belong to this cache. Whatever was recorded on an earlier one is void."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Around all forwards of one text."""
        ...

    def prepare_draft(self, mask: SkipMask) -> None:
        """Make the copies of weights that drafts under this mask compute with, where there are none yet: outside a
        recording, whose memory would keep what is only needed to make them."""
        ...

    def forward(self, ids: torch.Tensor, mask: SkipMask, num_logits: int) -> torch.Tensor:
        """The ordinary forward, for prompts: logits (num_logits, V); the cache advances by len(ids)."""
        ...

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: SkipMask,
        num_visible: int,
        num_logits: int,
        branches: Branches | None = None,
    ) -> torch.Tensor:
        """The same in static form: logits (num_logits, V) of ids (T,) at positions (T,); the length does not move.

        Pure device work on buffers whose addresses stay: may be recorded, and replayed at other positions.
        num_visible: more than every place that is written; attention looks at that many under a mask.
        branches: None where each token is kept at its position and sees all before it.
        """
        ...


def num_visible_for(num_positions: int, limit: int, smallest: int = MIN_VISIBLE) -> int:
    """Positions a recorded step attends to when it must see `num_positions` of `limit`: a power of two, or the limit.

    Too many cost memory traffic, too few cost recordings. At batch 1 the weights are read in full by every step and a
    text's keys and values are a few percent of them, so twice as many as needed is cheap, where a mask over a
    long buffer is not: a decode step's attention keeps few of a GPU's processors busy and takes time by its length.
    """
    return min(max(smallest, 1 << (num_positions - 1).bit_length()), limit)


def additive_mask(
    positions: torch.Tensor,
    num_visible: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    repeats: int = 1,
    branches: Branches | None = None,
) -> torch.Tensor:
    """(repeats * T, num_visible): 0 where a query at `positions` (T,) may look, -inf elsewhere; the T rows repeated."""
    queries = positions.unsqueeze(1)
    keys = torch.arange(num_visible, device=positions.device)
    if branches is None:
        visible = keys <= queries
    else:
        visible, keys = branches.look(keys, positions)
    if window is not None:
        visible = visible & (keys > queries - window)
    mask = additive(visible, dtype)
    return mask.repeat(repeats, 1) if repeats > 1 else mask
