"""RoundWork: the tensor code of a round, whole or in pieces, on buffers that keep their addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.kv_cache import DeviceNumber, StaticCache
from layerskip.rounds.sampling import Sampler, SamplingParams, choose, chosen_probability, top_probability

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
        self.noise = numbers(room + 1, vocab_size) if sampled else None
        """Of the drafts' places and the one after them."""


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

    def whole(self) -> Piece:
        """gamma drafts, however unsure, and their verification."""
        plan = self._plan
        key = ("round", plan.skip_mask, plan.gamma, plan.with_prob, *self._common)
        return Piece(key, self._run_whole, self._state)

    def draft(self) -> Piece:
        """The draft at `index`, from `current`, and its confidence; index and current move on."""
        key = ("draft", self._plan.skip_mask, *self._common)
        return Piece(key, self._run_draft, (self.buffers.current, self.buffers.index))

    def verification(self, num_drafts: int) -> Piece:
        """Of the first so many of what drafts have left; the same for every mask."""
        key = ("verify", num_drafts, self._plan.with_prob, *self._common)
        return Piece(key, lambda: self._run_verification(num_drafts), self._state)

    def host_verification(self) -> Piece:
        """Of gamma drafts that the host has put in their buffer, of which `limit` count."""
        key = ("verify_host", self._plan.gamma, self._plan.with_prob, *self._common)
        return Piece(key, self._run_host_verification, self._state)

    def result(self, num_drafts: int) -> torch.Tensor:
        """What the host reads after a round of so many drafts."""
        return self.buffers.result[: 4 + num_drafts]

    def _run_whole(self) -> None:
        buffers, token = self.buffers, self._host.token.tensor
        tokens: list[torch.Tensor] = []
        for i in range(self._plan.gamma):
            noise = None if buffers.noise is None else buffers.noise[i : i + 1]
            token, _ = self._draft(token, self._position + buffers.offsets[i : i + 1], noise)
            tokens.append(token)
        self._verify(torch.cat(tokens) if tokens else buffers.drafts[:0], self._host.limit.tensor)

    def _run_draft(self) -> None:
        buffers, index = self.buffers, self.buffers.index
        noise = None if buffers.noise is None else buffers.noise.index_select(0, index)
        token, logits = self._draft(buffers.current, self._position + index, noise)
        buffers.confidence.copy_(top_probability(logits))
        buffers.drafts.index_copy_(0, index, token)
        buffers.current.copy_(token)
        index.add_(1)

    def _run_verification(self, num_drafts: int) -> None:
        buffers = self.buffers
        # The offsets are the numbers from 0 on, so this one is the number of drafts, in device memory.
        self._verify(buffers.drafts[:num_drafts], buffers.offsets[num_drafts : num_drafts + 1])

    def _run_host_verification(self) -> None:
        self._verify(self.buffers.drafts[: self._plan.gamma], self._host.limit.tensor)

    def _draft(
        self, token: torch.Tensor, position: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the next draft token (1,), its logits (1, V)). noise: (1, V), None for a greedy one."""
        logits = self._host.step(token, position, self._plan.skip_mask, self._num_visible, 1)
        logits = self._shaping.shape(logits, ())
        return choose(logits, noise), logits

    def _verify(self, drafts: torch.Tensor, limit: torch.Tensor) -> None:
        """As `layerskip.rounds.verifier.verify`, of drafts (G,), of which `limit` (1,) may be accepted."""
        buffers, host, num_drafts = self.buffers, self._host, drafts.shape[0]
        ids, positions = torch.cat([host.token.tensor, drafts]), self._position + buffers.offsets[: num_drafts + 1]
        logits = host.step(ids, positions, self._no_skip, self._num_visible, num_drafts + 1)
        logits = self._shaping.shape(logits, ())
        chosen = choose(logits, None if buffers.noise is None else buffers.noise[: num_drafts + 1])
        allowed = buffers.offsets[:num_drafts] < limit
        accepted = _prefix_length((drafts == chosen[:-1]) & allowed)
        token = chosen.gather(0, accepted)
        host.token.tensor.copy_(token)
        self._position.add_(accepted + 1)
        buffers.result[1 : 4 + num_drafts].copy_(torch.cat([limit, accepted, token, drafts]))
        if self._plan.with_prob:
            buffers.result[:1].copy_(chosen_probability(logits, chosen).gather(0, accepted))


def _prefix_length(kept: torch.Tensor) -> torch.Tensor:
    """(1,) int64: how many are True before the first False."""
    return kept.long().cumprod(0).sum(0, keepdim=True)
