"""LayerSkipDrafter: the target's own weights under a skip mask, writing into the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.drafters.base import Draft, DraftOnDevice, Proposal
from layerskip.drafters.chain import ChainDrafter, ChainSettings
from layerskip.engines.base import Engine
from layerskip.rounds.device_round import DeviceRound
from layerskip.rounds.preparation import ForwardPlan, Starts
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler


@dataclass(frozen=True)
class LayerSkipSettings(ChainSettings):
    """What a layer-skip draft follows; fields as in `DecodeConfig`."""

    skip_mask: SkipMask = field(kw_only=True)


class LayerSkipDrafter(ChainDrafter[LayerSkipSettings]):
    """Autoregressive drafting under `skip_mask`. Has no state of its own, so it is its own session.

    Cost: one masked forward a token; syncs as `ChainDrafter.chain`. On an engine that offers rounds, a part of the
    round's one piece of device work.
    """

    def __init__(
        self, engine: Engine, sampler: Sampler, settings: LayerSkipSettings, *, with_prob: bool | None = None
    ) -> None:
        """with_prob: whether rounds on the device tell the target's probability; by default where it is looked at."""
        super().__init__(sampler, settings)
        self._engine = engine
        self._device_round = self._on_device(self.needs_target_prob if with_prob is None else with_prob)

    @cached_property
    def rows(self) -> torch.Tensor | slice | None:
        mask = self._settings.skip_mask
        return None if mask.draft_vocab is None else self._engine.draft_rows(mask)

    def _on_device(self, with_prob: bool) -> DeviceRound | None:
        one = self._settings
        if one.siblings:  # a round on the device verifies a chain
            return None
        plan = RoundPlan(one.skip_mask, one.gamma, one.draft_threshold, with_prob=with_prob)
        return self._engine.make_round(plan, self._sampler)

    def prepare(self, starts: Starts) -> None:
        if self._device_round is not None:
            self._device_round.prepare(starts.rounds)
        elif self._engine.name == "cuda_graph":  # of which the loop prepares rounds alone
            self._engine.prepare([ForwardPlan(self._settings.skip_mask, 1, starts.rounds)])

    def begin(self) -> LayerSkipDrafter:
        return self

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Proposal:
        """See `DraftSession`. None while the target is unsure, as `target_threshold` says."""
        if limit < 1 or not self.is_sure(target_prob):
            return None
        num_tokens = min(self.gamma, limit)
        if self._device_round is not None:
            return DraftOnDevice(self._device_round, num_tokens)
        return self.draft(context, num_tokens)

    def draft(self, context: Sequence[int], limit: int) -> Draft:
        """Draft up to `limit` tokens on the host."""
        cache = self._engine.cache
        start = cache.length
        first = torch.tensor([context[-1]], device=self._engine.device)

        def next_logits(last: torch.Tensor | None) -> torch.Tensor:
            return self._engine.forward(first if last is None else last, self._settings.skip_mask)

        draft = self.chain(context, limit, next_logits)
        cache.rollback_to(start)
        return draft
