"""DeviceRound: drafts, verification, acceptance and the next token as device work, with one read after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.rounds.preparation import verifications
from layerskip.rounds.round_work import Piece, RoundHost, RoundPlan, RoundWork
from layerskip.rounds.sampling import Sampler
from layerskip.rounds.verifier import Verdict


@dataclass(frozen=True)
class RoundResult:
    """What one round did."""

    draft_ids: list[int]
    """Drafted tokens, up to the one after which drafting stopped."""
    verdict: Verdict


class DeviceRound:
    """Rounds under one plan; what is recorded for them is the engine's, so plans come and go for nothing.

    The tokens are those of the host loop. The noise of drawn ones is copied into place before a round, so that no
    generator is part of a recording.

    Cost: one device sync and one recorded piece. With a `draft_threshold` a round runs in pieces, one for each draft
    and one for the verification, with a sync after each draft but the last to look at its confidence.
    Near the end of a text fewer than gamma drafts are wanted; a whole round drafts them all the same and does not
    accept them, which costs less than recording a round for every smaller gamma.
    """

    def __init__(self, host: RoundHost, plan: RoundPlan, sampler: Sampler) -> None:
        self._host = host
        if plan.gamma == 0:  # the target alone is the same work for all of these
            plan = replace(plan, skip_mask=SkipMask.none(plan.skip_mask.num_layers), draft_threshold=0.0)
        self._plan = plan
        self._sampler = sampler
        self._in_pieces = plan.draft_threshold > 0.0
        self._works: dict[int, RoundWork] = {}

    @property
    def gamma(self) -> int:
        """Drafts of a round, at most."""
        return self._plan.gamma

    @torch.inference_mode()
    def run(self, last_token: int, max_drafts: int, *, takes_all: bool = False) -> RoundResult:
        """One round after `last_token`, which is not in the cache yet; afterwards the cache holds all but the next one.

        max_drafts: 0..gamma. takes_all: look at each draft's confidence as a `draft_threshold` demands and go on
        whatever it is, to time so many drafts.
        Raises: ValueError if the cache is too small.
        """
        work = self._begin(last_token)
        self._place_noise(work)
        if not self._in_pieces:
            self._host.limit.set(max_drafts)
            return self._conclude(work.whole(), work.result(self._plan.gamma))
        num_drafts = self._draft(work, max_drafts, takes_all=takes_all)
        return self._conclude(work.verification(num_drafts), work.result(num_drafts))

    @torch.inference_mode()
    def verify(self, last_token: int, draft_ids: torch.Tensor) -> Verdict:
        """The verdict on up to gamma draft tokens (G,) of the host's; else as `run`."""
        work = self._begin(last_token)
        self._place_noise(work)
        work.buffers.drafts[: len(draft_ids)].copy_(draft_ids)
        self._host.limit.set(len(draft_ids))
        return self._conclude(work.host_verification(), work.result(self._plan.gamma)).verdict

    @torch.inference_mode()
    def prepare_verify(self, starts: range) -> None:
        """As `prepare`, for `verify`."""
        self._host.cache.position_on_device()
        for num_visible in self._host.visible_sizes(starts, self._plan.gamma + 1):
            self._host.prepare_piece(self._work(num_visible).host_verification())

    @torch.inference_mode()
    def prepare(self, starts: range) -> None:
        """Record what rounds may need that begin with so many tokens in the cache, so that `run` only replays.

        Before the prompt's forward: what it leaves in the cache is overwritten by that.
        Cost: the recordings that there are not yet.
        """
        if not starts:
            return
        host, gamma = self._host, self._plan.gamma
        host.cache.position_on_device()
        if not self._in_pieces:
            for num_visible in host.visible_sizes(starts, gamma + 1):
                host.prepare_piece(self._work(num_visible).whole())
            return
        for num_visible in host.visible_sizes(starts, gamma + 1):
            work = self._work(num_visible)
            work.buffers.index.zero_()  # an earlier round may have left it past the last draft
            host.prepare_piece(work.draft())
        for num_drafts, where in verifications(starts, gamma, may_stop=True).items():
            for num_visible in host.visible_sizes(where, gamma + 1):
                host.prepare_piece(self._work(num_visible).verification(num_drafts))

    def _begin(self, last_token: int) -> RoundWork:
        """The work of a round after `last_token`, its inputs in place."""
        host, cache = self._host, self._host.cache
        needed = cache.length + self._plan.gamma + 1
        if needed > cache.capacity:
            raise ValueError(f"cache: capacity is {cache.capacity} tokens, a round needs {needed}")
        work = self._work(host.num_visible_for(needed))
        host.token.set(last_token)
        cache.position_on_device()
        return work

    def _place_noise(self, work: RoundWork) -> None:
        if (noise := work.buffers.noise) is not None:
            # The last token is not in the cache yet, so the first draft's place is one further.
            count, place = self._plan.gamma + 1, self._host.cache.length + 1
            noise[:count].copy_(self._sampler.noise(place, count, noise.shape[1], noise.device))

    def _work(self, num_visible: int) -> RoundWork:
        """Made once for each size, as long as the host's buffers stay."""
        work = self._works.get(num_visible)
        if work is None or work.cache is not self._host.cache:
            work = RoundWork(self._host, self._plan, self._sampler.params, num_visible)
            self._works[num_visible] = work
        return work

    def _draft(self, work: RoundWork, max_drafts: int, *, takes_all: bool) -> int:
        """How many tokens were drafted, one piece each, stopping after the first unsure one."""
        buffers, piece = work.buffers, work.draft()
        buffers.current.copy_(self._host.token.tensor)
        buffers.index.zero_()
        for num_drafts in range(1, max_drafts + 1):
            self._host.play(piece)
            # The last one's confidence decides nothing, so it is not read.
            looks = num_drafts < max_drafts
            if looks and float(buffers.confidence) < self._plan.draft_threshold and not takes_all:
                return num_drafts
        return max_drafts

    def _conclude(self, piece: Piece, result: torch.Tensor) -> RoundResult:
        """Run the piece that ends the round, and read what came out."""
        host, cache = self._host, self._host.cache
        start = cache.length
        # Until the read below says where they are: an exception in between must not leave a wrong belief.
        host.token.distrust()
        cache.position.distrust()
        host.play(piece)
        prob, *ids = self._read(result)
        num_drafts, num_accepted, next_token, *drafts = map(int, ids)
        host.token.known(next_token)
        cache.moved_to(start + num_accepted + 1)
        told = min(1.0, prob) if self._plan.with_prob else None
        return RoundResult(drafts[:num_drafts], Verdict(num_accepted, next_token, told))

    @staticmethod
    def _read(result: torch.Tensor) -> list[float]:
        """The one place where a round waits for the device."""
        numbers: list[float] = result.tolist()
        return numbers
