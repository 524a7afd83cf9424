"""RoundWork: the tensor code of a round, whole or in pieces, on buffers that keep their addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.device_number import DeviceNumber
from layerskip.draft_stopping import Stopping
from layerskip.kv_cache import StaticCache
from layerskip.sampling import Sampler, SamplingParams, top_probability
from layerskip.skip_mask import SkipMask
from layerskip.verifier import recovery_weights

_SMALLEST_ROOM = 8


@dataclass(frozen=True)
class RoundPlan:
    """What makes a round the work it is."""

    skip_mask: SkipMask
    gamma: int
    """0 is the target alone."""
    draft_threshold: float = 0.0
    with_prob: bool = False
    """Whether anyone looks at the target's probability of the next token."""
    whole: bool = True
    """Record a round in one piece. False: one draft step, replayed for every draft of every gamma, and verifications
    that all masks share; a round is then some launches slower, and a new mask takes one short recording."""


@dataclass(frozen=True)
class Piece:
    """Part of a round, to be recorded."""

    key: Hashable
    """Names what is recorded."""
    work: Callable[[], None]
    preserve: Sequence[torch.Tensor]
    """What it changes and must find unchanged at its real run."""


class RoundHost(Protocol):
    """What a round needs of the engine that runs it. All its buffers keep their addresses."""

    token: DeviceNumber
    """The last emitted token."""
    limit: DeviceNumber
    """How many of the drafts may be accepted."""
    stoppings: dict[Hashable, Stopping]
    """What is known of rounds under a `draft_threshold`, by plan and sampling."""

    @property
    def cache(self) -> StaticCache: ...

    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: SkipMask, num_visible: int, num_logits: int
    ) -> torch.Tensor:
        """See `StaticExecutor.step`."""
        ...

    def play(self, piece: Piece) -> None:
        """Replay it, or record it first. See `GraphPool.play`."""
        ...

    def prepare_piece(self, piece: Piece) -> None:
        """See `GraphPool.prepare`."""
        ...

    def num_visible_for(self, num_positions: int) -> int: ...

    def visible_sizes(self, starts: range, num_tokens: int) -> list[int]:
        """All that `num_visible_for` may say of so many tokens after any of these numbers of cached ones."""
        ...

    def round_buffers(self, room: int, *, sampled: bool) -> RoundBuffers:
        """Always the same ones for the same arguments."""
        ...


@dataclass(frozen=True)
class Noise:
    """Random numbers for one round, drawn anew before it."""

    uniform: torch.Tensor
    """(R,) for the acceptances."""
    draft: torch.Tensor
    """(R, V) exponential, for the drafts."""
    final: torch.Tensor
    """(1, V) exponential, for the token after them."""


class RoundBuffers:
    """Tensors that a round's pieces hand each other and the host, with room for R drafts.

    `result` is [prob, drafted, accepted, next, drafts...].
    """

    def __init__(self, room: int, vocab_size: int, device: torch.device, *, sampled: bool) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.room = room
        self.result = numbers(4 + room, dtype=torch.float64)  # ids are exact in it, and one read serves all
        self.offsets = torch.arange(room + 1, device=device)
        self.drafts = numbers(room, dtype=torch.long)
        self.index = numbers(1, dtype=torch.long)
        self.current = numbers(1, dtype=torch.long)
        self.confidence = numbers(1)
        self.draft_probs = numbers(room, vocab_size) if sampled else None
        self.noise = None
        if sampled:
            self.noise = Noise(numbers(room), numbers(room, vocab_size), numbers(1, vocab_size))


def _room_for(gamma: int) -> int:
    """Drafts that the buffers of rounds of up to gamma of them have room for: gammas share buffers, and with them
    recordings."""
    return max(_SMALLEST_ROOM, 1 << max(0, gamma - 1).bit_length())


class RoundWork:
    """The pieces of rounds that see `num_visible` positions; no method reads anything back or depends on the text."""

    def __init__(self, host: RoundHost, plan: RoundPlan, params: SamplingParams, num_visible: int) -> None:
        self._host, self._plan, self._num_visible = host, plan, num_visible
        self._no_skip = SkipMask.none(plan.skip_mask.num_layers)
        self.cache = host.cache
        self._position = host.cache.position.tensor
        self._shaping = Sampler(params)
        self.buffers = host.round_buffers(_room_for(plan.gamma), sampled=params.do_sample)
        self._state = (host.token.tensor, self._position)
        self._common = (self.buffers.room, num_visible, params if params.do_sample else None)
        self._watches = plan.draft_threshold > 0.0

    def whole(self) -> Piece:
        """gamma drafts, cut after the first unsure one, and their verification."""
        plan = self._plan
        key = ("round", plan.skip_mask, plan.gamma, plan.draft_threshold, plan.with_prob, *self._common)
        return Piece(key, self._run_whole, self._state)

    def draft(self) -> Piece:
        """The draft at `index`, from `current`; both move on."""
        key = ("draft", self._plan.skip_mask, self._watches, *self._common)
        return Piece(key, self._run_draft, (self.buffers.current, self.buffers.index))

    def verification(self, num_drafts: int) -> Piece:
        """Of the first so many of what drafts have left; the same for every mask."""
        key = ("verify", num_drafts, self._plan.with_prob, *self._common)
        return Piece(key, lambda: self._run_verification(num_drafts), self._state)

    def certain_verification(self) -> Piece:
        """Of gamma drafts that the host has put in their buffer, each certain to be proposed; `limit` of them count."""
        key = ("verify_certain", self._plan.gamma, self._plan.with_prob, *self._common)
        return Piece(key, self._run_certain_verification, self._state)

    def result(self, num_drafts: int) -> torch.Tensor:
        """What the host reads after a round of so many drafts."""
        return self.buffers.result[: 4 + num_drafts]

    def _run_whole(self) -> None:
        buffers, token, threshold = self.buffers, self._host.token.tensor, self._plan.draft_threshold
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        unsure: list[torch.Tensor] = []
        for i in range(self._plan.gamma):
            noise = None if buffers.noise is None else buffers.noise.draft[i : i + 1]
            token, logits = self._draft(token, self._position + buffers.offsets[i : i + 1], noise, rows)
            tokens.append(token)
            if self._watches:
                unsure.append(top_probability(logits).double() < threshold)
        limit = self._host.limit.tensor
        if unsure:
            limit = torch.minimum(limit, _prefix_length(~torch.cat(unsure)) + 1)
        drafts = torch.cat(tokens) if tokens else buffers.drafts[:0]
        probs = None if buffers.draft_probs is None else buffers.draft_probs[:0]
        self._verify(drafts, torch.cat(rows) if rows else probs, limit)

    def _run_draft(self) -> None:
        buffers, index = self.buffers, self.buffers.index
        rows: list[torch.Tensor] = []
        noise = None if buffers.noise is None else buffers.noise.draft.index_select(0, index)
        token, logits = self._draft(buffers.current, self._position + index, noise, rows)
        if self._watches:
            buffers.confidence.copy_(top_probability(logits))
        buffers.drafts.index_copy_(0, index, token)
        if buffers.draft_probs is not None:
            buffers.draft_probs.index_copy_(0, index, rows[0])
        buffers.current.copy_(token)
        index.add_(1)

    def _run_verification(self, num_drafts: int) -> None:
        buffers = self.buffers
        probs = None if buffers.draft_probs is None else buffers.draft_probs[:num_drafts]
        # The offsets are the numbers from 0 on, so this one is the number of drafts, in device memory.
        self._verify(buffers.drafts[:num_drafts], probs, buffers.offsets[num_drafts : num_drafts + 1])

    def _run_certain_verification(self) -> None:
        drafts, rows = self.buffers.drafts[: self._plan.gamma], None
        if self.buffers.draft_probs is not None:
            probs = self.buffers.draft_probs[: self._plan.gamma]
            rows = torch.zeros_like(probs).scatter(1, drafts.unsqueeze(-1), 1.0)
        self._verify(drafts, rows, self._host.limit.tensor)

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

    def _verify(self, drafts: torch.Tensor, rows: torch.Tensor | None, limit: torch.Tensor) -> None:
        """Shapes: drafts (G,), of which `limit` (1,) may be accepted; rows (G, V) that they were drawn from."""
        buffers, host, num_drafts = self.buffers, self._host, drafts.shape[0]
        ids, positions = torch.cat([host.token.tensor, drafts]), self._position + buffers.offsets[: num_drafts + 1]
        logits = host.step(ids, positions, self._no_skip, self._num_visible, num_drafts + 1)
        logits = self._shaping.shape(logits, ())
        if rows is None or buffers.noise is None:
            accepted, token, prob = self._verify_greedy(drafts, limit, logits)
        else:
            accepted, token, prob = self._verify_sampled(drafts, limit, (logits.softmax(dim=-1), rows), buffers.noise)
        host.token.tensor.copy_(token)
        self._position.add_(accepted + 1)
        buffers.result[1 : 4 + num_drafts].copy_(torch.cat([limit, accepted, token, drafts]))
        if prob is not None:
            buffers.result[:1].copy_(prob)

    def _verify_greedy(
        self, drafts: torch.Tensor, limit: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(accepted, next token, its probability), each (1,)."""
        best = logits.max(dim=-1)
        allowed = self.buffers.offsets[: drafts.shape[0]] < limit
        accepted = _prefix_length((drafts == best.indices[:-1]) & allowed)
        prob = None
        if self._plan.with_prob:
            prob = (best.values - logits.logsumexp(dim=-1)).exp().gather(0, accepted)
        return accepted, best.indices.gather(0, accepted), prob

    def _verify_sampled(
        self, drafts: torch.Tensor, limit: torch.Tensor, probs: tuple[torch.Tensor, torch.Tensor], noise: Noise
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `verify_sampled`, which see; probs are the target's (G+1, V) and the draft's (G, V)."""
        (target, draft), index, num_drafts = probs, drafts.unsqueeze(-1), drafts.shape[0]
        draft_p, target_p = (rows.gather(-1, index).squeeze(-1) for rows in (draft, target[:-1]))
        kept = noise.uniform[:num_drafts] * draft_p < target_p
        accepted = _prefix_length(kept & (self.buffers.offsets[:num_drafts] < limit))
        row = target.index_select(0, accepted)
        # After a full house nothing is subtracted: the bonus token is drawn from the target's row itself.
        against = torch.cat([draft, torch.zeros_like(row)]).index_select(0, accepted)
        token = _draw(recovery_weights(row, against * (accepted < limit)), noise.final)
        return accepted, token, row.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _prefix_length(kept: torch.Tensor) -> torch.Tensor:
    """(1,) int64: how many are True before the first False."""
    return kept.long().cumprod(0).sum(0, keepdim=True)


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """(1,) token drawn in proportion to `weights` (1, V), by exponential `noise` (1, V).

    Not `multinomial`, which looks at its input on the host first.
    """
    return (weights / noise).argmax(dim=-1)
