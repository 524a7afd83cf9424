"""Single steps of decoding, to be timed: on the host step by step, or on the device as recorded work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.config.decode_config import DecodeConfig, DraftedBy, DraftWeights
from layerskip.config.skip_mask import SkipMask
from layerskip.drafters import LayerSkipDrafter, LayerSkipSettings, make_drafter
from layerskip.drafters.draft_model import DraftModel, DraftModelDrafter
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.drafters.eagle.drafter import EagleDrafter
from layerskip.drafters.other_tokenizer import OtherTokenizerDrafter, OtherTokenizerSession
from layerskip.engines import Engine
from layerskip.engines.cuda_graph.engine import CudaGraphEngine
from layerskip.rounds.device_round import DeviceRound
from layerskip.rounds.preparation import ForwardPlan, Starts
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler
from layerskip.rounds.verifier import verify

_TAKEN_A_ROUND = 2
"""Positions that a round of trained weights goes over again, as the target has computed them since the last."""
_NEVER = 1e-30
"""A draft_threshold that is looked at after every token and never reached."""


@dataclass(frozen=True)
class TextEnd:
    """Where steps are timed."""

    text_ids: list[int]
    next_id: int
    """The greedy token after the text, which is not in the cache yet."""


class Step(Protocol):
    """Something to time after a text."""

    @property
    def room(self) -> int:
        """Positions that it needs after the text."""
        ...

    def prepare(self, length: int) -> None:
        """Before a text of this length has gone through the model; see `Engine.prepare`. Not timed."""
        ...

    @property
    def drafts_on(self) -> DraftModel | None:
        """A draft model, which is to be in a session too."""
        ...

    @property
    def num_verified(self) -> int:
        """Draft tokens that it verifies and does not draft."""
        ...

    @property
    def num_drafts(self) -> int:
        """Draft tokens of the last time, and of a tree its levels."""
        ...

    def place(self, end: TextEnd) -> None:
        """Have the cache hold the text, as a step before this one would leave it. Not timed."""
        ...

    def run(self, end: TextEnd) -> None:
        """What is timed."""
        ...


class StepMaker(Protocol):
    """Makes the steps of one engine."""

    draft_verifies: bool
    """Whether a `draft` ends with its verification, because decoding does not part them."""

    def verification(self, num_tokens: int) -> Step:
        """A target forward over so many tokens and its verdict."""
        ...

    def draft(self, drafted_by: DraftedBy, gamma: int, *, threshold: bool) -> Step:
        """gamma tokens under a mask or of trained weights. threshold: with the looks at their confidence."""
        ...


class HostSteps:
    """Drafter, forward and verifier, one after the other."""

    draft_verifies = False

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self._engine, self._sampler = engine, sampler

    def verification(self, num_tokens: int) -> Step:
        return _HostStep(self._engine, self._sampler, None, num_tokens - 1, verifies=True)

    def draft(self, drafted_by: DraftedBy, gamma: int, *, threshold: bool) -> Step:
        if isinstance(drafted_by, DraftWeights):
            return _WeightsStep(self._engine, self._sampler, drafted_by, gamma, threshold=threshold)
        settings = LayerSkipSettings(gamma, _NEVER if threshold else 0.0, skip_mask=drafted_by)
        return _HostStep(self._engine, self._sampler, settings, gamma, verifies=False)


@dataclass(frozen=True)
class _HostStep:
    engine: Engine
    sampler: Sampler
    settings: LayerSkipSettings | None
    """None: the drafts are copies of the last token, and not timed."""
    num_drafts: int
    verifies: bool

    @property
    def drafts_on(self) -> DraftModel | None:
        return None

    def prepare(self, length: int) -> None:
        starts = range(length, length + 1)
        plans = [ForwardPlan(None, self.num_drafts + 1, starts)] if self.verifies else []
        if self.settings is not None:
            plans.append(ForwardPlan(self.settings.skip_mask, 1, range(length, length + self.num_drafts)))
        self.engine.prepare(plans)

    @property
    def room(self) -> int:
        return self.num_drafts + 1

    @property
    def num_verified(self) -> int:
        return self.num_drafts if self.settings is None else 0

    def place(self, end: TextEnd) -> None:
        self.engine.cache.rollback_to(len(end.text_ids))

    def run(self, end: TextEnd) -> None:
        engine, sampler, context = self.engine, self.sampler, [*end.text_ids, end.next_id]
        if self.settings is None:
            drafts = torch.tensor([end.next_id] * self.num_drafts, dtype=torch.long, device=engine.device)
        else:
            drafts = LayerSkipDrafter(engine, sampler, self.settings).draft(context, self.num_drafts).ids
        if self.verifies:
            ids = torch.cat([torch.tensor([end.next_id], device=engine.device), drafts])
            logits = engine.forward(ids, num_logits=self.num_drafts + 1)
            verify(drafts, sampler.shape(logits, context, drafts), sampler, len(context), with_prob=False)
            engine.cache.rollback_to(len(end.text_ids))


class _WeightsStep:
    """A draft of trained weights, in a round that begins with what an ordinary one goes over again; and then, if asked
    for, a verification of as many tokens."""

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        weights: DraftWeights,
        num_drafts: int,
        verification: Step | None = None,
        *,
        threshold: bool,
    ) -> None:
        config = DecodeConfig(
            drafter=weights.drafter,
            skip_mask=SkipMask.none(1),
            gamma=num_drafts,
            draft_threshold=_NEVER if threshold else 0.0,
            draft_weights=weights,
        )
        drafter = make_drafter(config, engine, sampler)
        assert isinstance(drafter, EagleDrafter | DraftModelDrafter | OtherTokenizerDrafter)
        self._engine, self._drafter, self._session, self._most = engine, drafter, drafter.begin(), num_drafts
        self.num_drafts = num_drafts
        self._verification = verification
        self._model = loaded_weights(engine, weights)
        self._has_begun = False

    @property
    def num_verified(self) -> int:
        return 0 if self._verification is None else self._verification.num_verified

    @property
    def drafts_on(self) -> DraftModel | None:
        return self._model if isinstance(self._model, DraftModel) else None

    @property
    def room(self) -> int:
        return self._most + 1

    def prepare(self, length: int) -> None:
        self._drafter.prepare(Starts(range(length, length + self._most), range(0)))
        if self._verification is not None:
            self._verification.prepare(length)

    def place(self, end: TextEnd) -> None:
        if self._verification is not None:
            self._verification.place(end)
        self._engine.cache.rollback_to(len(end.text_ids))
        if not self._has_begun:  # the text up to here is not to be timed
            self._propose(end, 1)
            self._has_begun = True
        self._session.forget_from(max(0, len(end.text_ids) - _TAKEN_A_ROUND))

    def _propose(self, end: TextEnd, count: int) -> None:
        context = [*end.text_ids, end.next_id]
        if isinstance(self._session, OtherTokenizerSession):  # which need not propose anything here
            self._session.rehearse(context, count)
        else:
            draft = self._session.propose(context, count, None)
            self.num_drafts = count if draft is None else len(draft.ids)

    def run(self, end: TextEnd) -> None:
        self._propose(end, self._most)
        if self._verification is not None:
            self._verification.run(end)


class DeviceSteps:
    """Recorded rounds. A draft is timed with its verification, because no wait for the device parts the two."""

    draft_verifies = True

    def __init__(self, engine: CudaGraphEngine, sampler: Sampler) -> None:
        self._engine, self._sampler = engine, sampler

    def verification(self, num_tokens: int) -> Step:
        no_skip = SkipMask.none(self._engine.num_layers)
        return self._step(RoundPlan(no_skip, num_tokens - 1), num_tokens - 1, verifies_only=True)

    def draft(self, drafted_by: DraftedBy, gamma: int, *, threshold: bool) -> Step:
        if not isinstance(drafted_by, SkipMask):
            verification = self.verification(gamma + 1)
            return _WeightsStep(self._engine, self._sampler, drafted_by, gamma, verification, threshold=threshold)
        return self._step(RoundPlan(drafted_by, gamma, _NEVER if threshold else 0.0), gamma)

    def whole_round(self, config: DecodeConfig, num_drafts: int) -> Step:
        """One that makes so many drafts under this config, as `generate` runs it."""
        with_prob = config.target_threshold > 0.0
        return self._step(RoundPlan(config.skip_mask, config.gamma, config.draft_threshold, with_prob), num_drafts)

    def _step(self, plan: RoundPlan, num_drafts: int, *, verifies_only: bool = False) -> Step:
        device_round = self._engine.make_round(plan, self._sampler)
        assert device_round is not None  # only a repetition penalty prevents one
        return _DeviceStep(self._engine, device_round, num_drafts, verifies_only)


@dataclass(frozen=True)
class _DeviceStep:
    engine: CudaGraphEngine
    round: DeviceRound
    num_drafts: int
    verifies_only: bool
    """The drafts are copies of the last token, and not timed."""

    @property
    def gamma(self) -> int:
        return self.round.gamma

    @property
    def drafts_on(self) -> DraftModel | None:
        return None

    def prepare(self, length: int) -> None:
        if self.verifies_only and self.gamma:
            self.round.prepare_verify(range(length, length + 1))
        else:
            # As if the text went on for just long enough for a round of gamma drafts to begin here.
            self.round.prepare(range(length, length + max(self.gamma, 1)))

    @property
    def room(self) -> int:
        return self.gamma + 1

    @property
    def num_verified(self) -> int:
        return self.gamma if self.verifies_only else 0

    def place(self, end: TextEnd) -> None:
        self.engine.cache.rollback_to(len(end.text_ids))
        self.engine.cache.position_on_device()
        self.engine.token.set(end.next_id)

    def run(self, end: TextEnd) -> None:
        if self.verifies_only and self.gamma:
            self.round.verify(end.next_id, self.engine.token.tensor.expand(self.num_drafts))
        else:
            self.round.run(end.next_id, self.num_drafts, takes_all=True)
