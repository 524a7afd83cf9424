"""HybridDrafter: lookup where the text has been there before, layer skipping elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.drafters.base import Proposal
from layerskip.drafters.layer_skip import LayerSkipDrafter
from layerskip.drafters.lookup import LookupDrafter, LookupSession
from layerskip.rounds.preparation import Starts


class HybridDrafter:
    """Each part has its own gamma and target threshold.

    continues: what was looked up and is shorter than the layer-skip gamma is drafted on by layer skipping. Such a round
    is run by the host on every engine.
    Cost: that of the part that proposes; a lookup that finds nothing takes some microseconds.
    """

    def __init__(self, lookup: LookupDrafter, layer_skip: LayerSkipDrafter, *, continues: bool) -> None:
        self._lookup, self._layer_skip, self._continues = lookup, layer_skip, continues

    @property
    def gamma(self) -> int:
        return max(self._lookup.gamma, self._layer_skip.gamma)

    @property
    def needs_target_prob(self) -> bool:
        return self._lookup.needs_target_prob or self._layer_skip.needs_target_prob

    def prepare(self, starts: Starts, *, profile: bool) -> None:
        self._layer_skip.prepare(starts, profile=profile)

    def begin(self) -> _HybridSession:
        return _HybridSession(self._lookup.begin(), self._layer_skip, continues=self._continues)


class _HybridSession:
    """See `DraftSession`."""

    def __init__(self, lookup: LookupSession, layer_skip: LayerSkipDrafter, *, continues: bool) -> None:
        self._lookup, self._layer_skip, self._continues = lookup, layer_skip, continues

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Proposal:
        found = self._lookup.propose(context, limit, target_prob)
        if found is None:
            return self._layer_skip.propose(context, limit, target_prob)
        most = min(limit, self._layer_skip.gamma)
        if not self._continues or found.num_looked_up >= most or not self._layer_skip.is_sure(target_prob):
            return found
        return self._layer_skip.draft(context, most, found.ids.tolist())
