"""HybridDrafter: lookup where the text has been there before, a computed draft elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from layerskip.drafters.base import Drafter, DraftSession, Proposal
from layerskip.drafters.lookups.drafter import LookupDrafter, LookupSession
from layerskip.rounds.preparation import Starts


class HybridDrafter:
    """Each part has its own gamma and target threshold.

    computed: by layer skipping or by trained weights.
    Cost: that of the part that proposes; a lookup that finds nothing takes some microseconds.
    """

    def __init__(self, lookup: LookupDrafter, computed: Drafter) -> None:
        self._lookup, self._computed = lookup, computed

    @property
    def gamma(self) -> int:
        return max(self._lookup.gamma, self._computed.gamma)

    @property
    def needs_target_prob(self) -> bool:
        return self._lookup.needs_target_prob or self._computed.needs_target_prob

    def prepare(self, starts: Starts) -> None:
        self._computed.prepare(starts)

    def session(self, capacity: int) -> AbstractContextManager[None]:
        return self._computed.session(capacity)

    def begin(self) -> _HybridSession:
        return _HybridSession(self._lookup.begin(), self._computed.begin())


class _HybridSession:
    """See `DraftSession`."""

    def __init__(self, lookup: LookupSession, computed: DraftSession) -> None:
        self._lookup, self._computed = lookup, computed

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Proposal:
        found = self._lookup.propose(context, limit, target_prob)
        return self._computed.propose(context, limit, target_prob) if found is None else found
