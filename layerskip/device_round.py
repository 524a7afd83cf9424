"""DeviceRound: drafts, verification, acceptance and the next token as device work, with one read after it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from layerskip.device_number import DeviceNumber
from layerskip.kv_cache import StaticCache
from layerskip.sampling import Sampler, SamplingParams
from layerskip.skip_mask import SkipMask
from layerskip.verifier import Verdict, recovery_weights


@dataclass(frozen=True)
class RoundPlan:
    """What makes a round the work it is."""

    skip_mask: SkipMask
    gamma: int
    """0 is the target alone."""
    draft_threshold: float = 0.0
    with_prob: bool = False
    """Whether anyone looks at the target's probability of the next token."""


@dataclass(frozen=True)
class RoundResult:
    """What one round did."""

    draft_ids: list[int]
    """Drafted tokens, up to the one after which drafting stopped."""
    verdict: Verdict


class RoundHost(Protocol):
    """What a round needs of the engine that runs it. All its buffers keep their addresses."""

    token: DeviceNumber
    """The last emitted token."""
    limit: DeviceNumber
    """How many of the drafts may be accepted."""

    @property
    def cache(self) -> StaticCache: ...

    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: SkipMask, num_visible: int, num_logits: int
    ) -> torch.Tensor:
        """See `StaticExecutor.step`."""
        ...

    def play(self, key: Hashable, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> None:
        """See `GraphPool.play`."""
        ...

    def prepare_piece(self, key: Hashable, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> None:
        """See `GraphPool.prepare`."""
        ...

    def num_visible_for(self, num_positions: int) -> int: ...

    def visible_sizes(self, starts: range, num_tokens: int) -> list[int]:
        """All that `num_visible_for` may say of so many tokens after any of these numbers of cached ones."""
        ...

    def round_buffers(self, gamma: int, *, sampled: bool) -> RoundBuffers:
        """Always the same ones for the same arguments."""
        ...


@runtime_checkable
class OffersRounds(Protocol):
    """An engine that can run a whole round on the device."""

    def make_round(self, plan: RoundPlan, sampler: Sampler) -> DeviceRound | None:
        """None where this round needs the host in between (a repetition penalty, which looks at the text)."""
        ...


@dataclass(frozen=True)
class Noise:
    """Random numbers for one round, drawn anew before it."""

    uniform: torch.Tensor
    """(G,) for the acceptances."""
    draft: torch.Tensor
    """(G, V) exponential, for the drafts."""
    final: torch.Tensor
    """(1, V) exponential, for the token after them."""


class RoundBuffers:
    """Tensors that one round's pieces hand each other and the host; `result` is [prob, accepted, next, drafts...]."""

    def __init__(self, gamma: int, vocab_size: int, device: torch.device, *, sampled: bool) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.result = numbers(3 + gamma, dtype=torch.float64)  # ids are exact in it, and one read serves all
        self.offsets = torch.arange(gamma + 1, device=device)
        self.drafts = numbers(gamma, dtype=torch.long)
        self.index = numbers(1, dtype=torch.long)
        self.current = numbers(1, dtype=torch.long)
        self.confidence = numbers(1)
        self.draft_probs = numbers(gamma, vocab_size) if sampled else None
        self.noise = None
        if sampled:
            self.noise = Noise(numbers(gamma), numbers(gamma, vocab_size), numbers(1, vocab_size))


class DeviceRound:
    """Rounds under one plan; what is recorded for them is the engine's, so plans come and go for nothing.

    The tokens are those of the host loop, drawn ones from the same distribution (by other random numbers: the noise of
    a round is drawn before it, from the run's own generator, so that no generator is part of a recording).

    Cost: without a `draft_threshold` one recorded piece and one device sync. With one, a piece a draft token, a sync
    after each but the last, and one of each for the rest: drafting on and discarding would spend what the threshold is
    there to save.
    Near the end of a text fewer than gamma drafts are wanted; they are drafted all the same and not accepted, which
    costs less than recording a round for every smaller gamma.
    """

    def __init__(self, host: RoundHost, plan: RoundPlan, sampler: Sampler) -> None:
        self._host = host
        self._plan = plan if plan.gamma else replace(plan, skip_mask=SkipMask.none(plan.skip_mask.num_layers))
        self._sampler = sampler
        self._works: dict[int, _RoundWork] = {}

    @torch.inference_mode()
    def run(self, last_token: int, max_drafts: int, *, after_draft: Callable[[], None] | None = None) -> RoundResult:
        """One round after `last_token`, which is not in the cache yet; afterwards the cache holds all but the next one.

        max_drafts: 0..gamma. after_draft: called between drafting and verifying, which are apart then.
        Raises: ValueError if the cache is too small.
        """
        work = self._begin(last_token)
        if self._is_apart(after_draft is not None):
            num_drafts = self._draft(work, max_drafts)
            if after_draft is not None:
                after_draft()
            return self._conclude(work, "verify", work.verify_kept, num_drafts)
        return self._conclude(work, "round", work.whole, max_drafts)

    def _begin(self, last_token: int) -> _RoundWork:
        """The work of a round after `last_token`, its inputs in place."""
        host, cache = self._host, self._host.cache
        needed = cache.length + self._plan.gamma + 1
        if needed > cache.capacity:
            raise ValueError(f"cache: capacity is {cache.capacity} tokens, a round needs {needed}")
        work = self._work(host.num_visible_for(needed))
        host.token.set(last_token)
        cache.position_on_device()
        if (noise := work.buffers.noise) is not None:
            self._sampler.fill_noise(noise.uniform, noise.draft, noise.final)
        return work

    @torch.inference_mode()
    def verify(self, last_token: int, draft_ids: torch.Tensor) -> Verdict:
        """The verdict on up to gamma draft tokens (G,) of the host's, each certain to be proposed; else as `run`."""
        work = self._begin(last_token)
        work.buffers.drafts[: len(draft_ids)].copy_(draft_ids)
        return self._conclude(work, "verify_certain", work.verify_certain, len(draft_ids)).verdict

    @torch.inference_mode()
    def prepare_verify(self, starts: range) -> None:
        """As `prepare`, for `verify`."""
        self._host.cache.position_on_device()
        for num_visible in self._host.visible_sizes(starts, self._plan.gamma + 1):
            work = self._work(num_visible)
            state = (self._host.token.tensor, self._host.cache.position.tensor)
            self._host.prepare_piece(work.key("verify_certain"), work.verify_certain, state)

    @torch.inference_mode()
    def prepare(self, starts: range, *, apart: bool = False) -> None:
        """Record what rounds may need that begin with so many tokens in the cache, so that `run` only replays.

        apart: with `after_draft`. Before the prompt's forward: what it leaves in the cache is overwritten by that.
        """
        host, plan = self._host, self._plan
        host.cache.position_on_device()
        for num_visible in host.visible_sizes(starts, plan.gamma + 1):
            work = self._work(num_visible)
            state = (host.token.tensor, host.cache.position.tensor)
            if self._is_apart(apart):
                work.buffers.index.zero_()
                host.prepare_piece(work.key("draft"), work.draft_next, (work.buffers.current, work.buffers.index))
                host.prepare_piece(work.key("verify"), work.verify_kept, state)
            else:
                host.prepare_piece(work.key("round"), work.whole, state)

    def _is_apart(self, asked_for: bool) -> bool:
        return self._plan.gamma > 0 and (asked_for or self._plan.draft_threshold > 0.0)

    def _work(self, num_visible: int) -> _RoundWork:
        """Made once for each size, as long as the host's buffers stay."""
        work = self._works.get(num_visible)
        if work is None or work.cache is not self._host.cache:
            work = _RoundWork(self._host, self._plan, self._sampler.params, num_visible)
            self._works[num_visible] = work
        return work

    def _draft(self, work: _RoundWork, max_drafts: int) -> int:
        """How many tokens were drafted, one piece each, stopping after the first unsure one."""
        buffers, threshold = work.buffers, self._plan.draft_threshold
        buffers.current.copy_(self._host.token.tensor)
        buffers.index.zero_()
        for num_drafts in range(1, max_drafts + 1):
            self._host.play(work.key("draft"), work.draft_next, (buffers.current, buffers.index))
            # The last one's confidence decides nothing, so it is not read.
            if threshold > 0.0 and num_drafts < max_drafts and float(buffers.confidence) < threshold:
                return num_drafts
        return max_drafts

    def _conclude(self, work: _RoundWork, name: str, piece: Callable[[], None], num_drafts: int) -> RoundResult:
        """Run the piece that ends the round, and read what came out."""
        host, cache = self._host, self._host.cache
        start = cache.length
        host.limit.set(num_drafts)
        # Until the read below says where they are: an exception in between must not leave a wrong belief.
        host.token.distrust()
        cache.position.distrust()
        host.play(work.key(name), piece, (host.token.tensor, cache.position.tensor))
        prob, *ids = self._read(work.buffers.result)
        num_accepted, next_token, *drafts = map(int, ids)
        host.token.known(next_token)
        cache.moved_to(start + num_accepted + 1)
        wanted = self._plan.with_prob or not self._sampler.greedy
        return RoundResult(drafts[:num_drafts], Verdict(num_accepted, next_token, min(1.0, prob) if wanted else None))

    @staticmethod
    def _read(result: torch.Tensor) -> list[float]:
        """The one place where a round waits for the device."""
        numbers: list[float] = result.tolist()
        return numbers


class _RoundWork:
    """The tensor code of a round; no method reads anything back, and none depends on the text."""

    def __init__(self, host: RoundHost, plan: RoundPlan, params: SamplingParams, num_visible: int) -> None:
        self._host, self._plan, self._num_visible = host, plan, num_visible
        self._no_skip = SkipMask.none(plan.skip_mask.num_layers)
        self.cache = host.cache
        self._position = host.cache.position.tensor
        self._shaping = Sampler(params)
        self._sampling = params if params.do_sample else None
        self.buffers = host.round_buffers(plan.gamma, sampled=params.do_sample)

    def key(self, name: str) -> Hashable:
        """Names what is recorded; verification alone is the same for every mask."""
        plan = self._plan
        mask = plan.skip_mask if name in ("round", "draft") else None
        return (name, mask, plan.gamma, self._num_visible, plan.with_prob, self._sampling)

    def whole(self) -> None:
        """gamma drafts and their verification."""
        buffers, token = self.buffers, self._host.token.tensor
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for i in range(self._plan.gamma):
            noise = None if buffers.noise is None else buffers.noise.draft[i : i + 1]
            token, _ = self._draft(token, self._position + buffers.offsets[i : i + 1], noise, rows)
            tokens.append(token)
        drafts = torch.cat(tokens) if tokens else buffers.drafts
        self._verify(drafts, torch.cat(rows) if rows else buffers.draft_probs)

    def draft_next(self) -> None:
        """The draft at `index`, from `current`; both move on."""
        buffers, index = self.buffers, self.buffers.index
        rows: list[torch.Tensor] = []
        noise = None if buffers.noise is None else buffers.noise.draft.index_select(0, index)
        token, logits = self._draft(buffers.current, self._position + index, noise, rows)
        buffers.confidence.copy_((logits.max() - logits.logsumexp(-1)).exp())
        buffers.drafts.index_copy_(0, index, token)
        if buffers.draft_probs is not None:
            buffers.draft_probs.index_copy_(0, index, rows[0])
        buffers.current.copy_(token)
        index.add_(1)

    def verify_kept(self) -> None:
        """Verification of what `draft_next` left; drafts beyond `limit` are those of an earlier round, and ignored."""
        self._verify(self.buffers.drafts, self.buffers.draft_probs)

    def verify_certain(self) -> None:
        """Verification of drafts that the host has put into the buffer, each certain to be proposed."""
        buffers = self.buffers
        rows = None
        if buffers.draft_probs is not None:
            rows = torch.zeros_like(buffers.draft_probs).scatter(1, buffers.drafts.unsqueeze(-1), 1.0)
        self._verify(buffers.drafts, rows)

    def _draft(
        self, token: torch.Tensor, position: torch.Tensor, noise: torch.Tensor | None, rows: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the next draft token (1,), its logits (1, V)); the row it was drawn from is added to `rows`."""
        logits = self._host.step(token, position, self._plan.skip_mask, self._num_visible, 1)
        logits = self._shaping.shape(logits, ())
        if noise is None:
            return logits.max(dim=-1).indices, logits
        rows.append(logits.softmax(dim=-1))
        return _draw(rows[-1], noise), logits

    def _verify(self, drafts: torch.Tensor, rows: torch.Tensor | None) -> None:
        gamma, buffers, host = self._plan.gamma, self.buffers, self._host
        ids = torch.cat([host.token.tensor, drafts])
        logits = host.step(ids, self._position + buffers.offsets, self._no_skip, self._num_visible, gamma + 1)
        logits = self._shaping.shape(logits, ())
        allowed = buffers.offsets[:gamma] < host.limit.tensor
        if rows is None or buffers.noise is None:
            accepted, token, prob = self._verify_greedy(drafts, allowed, logits)
        else:
            accepted, token, prob = self._verify_sampled(drafts, allowed, (logits.softmax(dim=-1), rows), buffers.noise)
        host.token.tensor.copy_(token)
        self._position.add_(accepted + 1)
        buffers.result[1:].copy_(torch.cat([accepted, token, drafts]))
        if prob is not None:
            buffers.result[:1].copy_(prob)

    def _verify_greedy(
        self, drafts: torch.Tensor, allowed: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(accepted, next token, its probability), each (1,)."""
        best = logits.max(dim=-1)
        accepted = _prefix_length((drafts == best.indices[:-1]) & allowed)
        prob = None
        if self._plan.with_prob:
            prob = (best.values - logits.logsumexp(dim=-1)).exp().gather(0, accepted)
        return accepted, best.indices.gather(0, accepted), prob

    def _verify_sampled(
        self, drafts: torch.Tensor, allowed: torch.Tensor, probs: tuple[torch.Tensor, torch.Tensor], noise: Noise
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `verify_sampled`, which see; probs are the target's (G+1, V) and the draft's (G, V)."""
        (target, draft), index = probs, drafts.unsqueeze(-1)
        kept = noise.uniform * draft.gather(-1, index).squeeze(-1) < target[:-1].gather(-1, index).squeeze(-1)
        accepted = _prefix_length(kept & allowed)
        row = target.index_select(0, accepted)
        # After a full house nothing is subtracted: the bonus token is drawn from the target's row itself.
        against = torch.cat([draft, torch.zeros_like(row)]).index_select(0, accepted)
        against = against * (accepted < self._host.limit.tensor)
        token = _draw(recovery_weights(row, against), noise.final)
        return accepted, token, row.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _prefix_length(kept: torch.Tensor) -> torch.Tensor:
    """(1,) int64: how many are True before the first False."""
    return kept.long().cumprod(0).sum(0, keepdim=True)


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """(1,) token drawn in proportion to `weights` (1, V), by exponential `noise` (1, V).

    Not `multinomial`, which looks at its input on the host first.
    """
    return (weights / noise).argmax(dim=-1)
