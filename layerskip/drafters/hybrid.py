"""HybridDrafter: lookup where the text has been there before, a computed draft elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from layerskip.drafters.base import Drafter, DraftSession, Proposal
from layerskip.drafters.layer_skip import LayerSkipDrafter
from layerskip.drafters.lookup import LookupDrafter, LookupSession
from layerskip.rounds.preparation import Starts


class HybridDrafter:
    """Each part has its own gamma and target threshold.

    computed: by layer skipping or by trained weights. continues: the same layer skipping, where what was looked up and
    is shorter than its gamma is drafted on; such a round is run by the host on every engine.
    Cost: that of the part that proposes; a lookup that finds nothing takes some microseconds.
    """

    def __init__(self, lookup: LookupDrafter, computed: Drafter, *, continues: LayerSkipDrafter | None = None) -> None:
        self._lookup, self._computed, self._continues = lookup, computed, continues

    @property
    def gamma(self) -> int:
        return max(self._lookup.gamma, self._computed.gamma)

    @property
    def needs_target_prob(self) -> bool:
        return self._lookup.needs_target_prob or self._computed.needs_target_prob

    def prepare(self, starts: Starts, *, profile: bool) -> None:
        self._computed.prepare(starts, profile=profile)

    def session(self, capacity: int) -> AbstractContextManager[None]:
        return self._computed.session(capacity)

    def begin(self) -> _HybridSession:
        return _HybridSession(self._lookup.begin(), self._computed.begin(), self._continues)


class _HybridSession:
    """See `DraftSession`."""

    def __init__(self, lookup: LookupSession, computed: DraftSession, continues: LayerSkipDrafter | None) -> None:
        self._lookup, self._computed, self._continues = lookup, computed, continues

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Proposal:
        found = self._lookup.propose(context, limit, target_prob)
        if found is None:
            return self._computed.propose(context, limit, target_prob)
        mask = self._continues
        if mask is None or found.num_looked_up >= (most := min(limit, mask.gamma)) or not mask.is_sure(target_prob):
            return found
        return mask.draft(context, most, found.ids.tolist())
