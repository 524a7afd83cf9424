"""Stopping: whether a round on the device looks at each draft's confidence, or drafts on and cuts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stopping:
    """What is known of rounds under one plan with a `draft_threshold`.

    A round that looks stops at the first unsure draft, and waits for the device after every one. A round that cuts
    makes all its drafts without waiting and drops those after the first unsure one. Both give the same tokens and
    counts. Which is faster depends on the device and on how long drafts become.
    """

    gamma: int
    break_even: float
    """A mean number of drafts: above it, cutting is faster."""
    num_rounds: int = 0
    num_drafted: int = 0

    @classmethod
    def measured(cls, gamma: int, shortest_s: float, longest_s: float, cutting_s: float) -> Stopping:
        """From the seconds of a round that looks and makes one draft, of one that makes gamma, and of one that cuts."""
        a_draft_s = (longest_s - shortest_s) / (gamma - 1) if gamma > 1 else 0.0
        if a_draft_s <= 0.0:
            return cls(gamma, 0.0 if cutting_s < longest_s else float("inf"))
        return cls(gamma, 1.0 + (cutting_s - shortest_s) / a_draft_s)

    @property
    def cuts(self) -> bool:
        """Whether rounds should cut, going by the rounds so far; before the first, by a draft of half of gamma."""
        expected = self.num_drafted / self.num_rounds if self.num_rounds else (1 + self.gamma) / 2
        return expected > self.break_even

    def add(self, num_drafted: int) -> None:
        """A round made so many drafts."""
        self.num_rounds += 1
        self.num_drafted += num_drafted
