"""The interface between proposing and verifying."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.rounds.device_round import DeviceRound
from layerskip.rounds.preparation import Starts
from layerskip.rounds.verifier import TreeDraft


@dataclass(frozen=True)
class Draft:
    """Tokens to verify.

    Shape: ids (G,) int64, G at least 1.
    """

    ids: torch.Tensor
    looked_up: bool = False
    """Found in text and not computed."""
    tree: TreeDraft | None = None
    """What is verified in their place where other branches are besides: a first part of them, and those."""


@dataclass(frozen=True)
class DraftOnDevice:
    """A draft that the device makes and verifies in one piece."""

    round: DeviceRound
    max_drafts: int


Proposal = Draft | DraftOnDevice | None
"""None: nothing to propose, the target decodes this token alone."""


class DraftSession(Protocol):
    """One text's drafting."""

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Proposal:
        """Up to `limit` tokens after `context`, or none.

        context: prompt and emitted tokens; it only grows from call to call, and what it grew by is what was accepted
        and what the target added. Its last token is not in the cache yet. Must leave the cache length as it was.
        target_prob: the target's probability of the last token, where the drafter asked for it.
        """
        ...


class Drafter(Protocol):
    """A way to propose tokens, made for one config and engine; serves any number of texts."""

    @property
    def gamma(self) -> int:
        """Most tokens that a proposal may hold."""
        ...

    @property
    def needs_target_prob(self) -> bool:
        """Whether a session looks at the target's probability of the token it just emitted."""
        ...

    def prepare(self, starts: Starts) -> None:
        """Have the engine record what rounds on the device may need; see `DecodeLoop.prepare`."""
        ...

    def session(self, capacity: int) -> AbstractContextManager[None]:
        """What a text of up to `capacity` tokens, drafts included, needs besides the engine's own session; around all
        of its rounds."""
        ...

    def begin(self) -> DraftSession:
        """Begin a text. Computes nothing: what a session needs of the prompt it takes from its first context."""
        ...
