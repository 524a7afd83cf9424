"""The autoregressive and the speculative loop: one loop, on one model, cache, sampler and engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from layerskip.config import DecodeConfig
from layerskip.drafters import Drafter, LayerSkipDrafter
from layerskip.engines import Engine
from layerskip.sampling import Sampler
from layerskip.stats import DecodeStats
from layerskip.verifier import Verdict, verify_greedy, verify_sampled

TARGET_ONLY, ACCEPTED, RECOVERED, BONUS = "target-only", "accepted", "recovered", "bonus"
"""Where an emitted token came from; the prompt's own forward counts as target-only."""


@dataclass(frozen=True)
class Emitted:
    """Tokens of one round (or one target-only step), in order, with the origin of each."""

    ids: list[int]
    origins: list[str]


@dataclass(frozen=True)
class DecodeRequest:
    """One prompt and when to stop."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    should_stop: Callable[[Sequence[int]], bool] | None = None
    """Called with all ids (prompt and emitted) after each emitted token, in order; True ends the text there."""
    profile: bool = False
    """Synchronise around drafting and verification, so that their shares of the time are exact on a GPU too."""


class DecodeLoop:
    """Decodes one request under a config.

    Greedy output is token-identical to the target alone; sampled output follows the target's distribution.
    Cost a round: up to gamma masked forwards and one full forward over the drafted tokens and one more. Memory: one
    cache of prompt + max_new_tokens + gamma positions.
    """

    def __init__(self, engine: Engine, config: DecodeConfig, sampler: Sampler) -> None:
        self._engine = engine
        self._config = config
        self._sampler = sampler
        self._drafter: Drafter = LayerSkipDrafter(engine, sampler, config.skip_mask, config.draft_threshold)

    def run(self, request: DecodeRequest, stats: DecodeStats) -> Iterator[Emitted]:
        """Yields what each step emitted; fills `stats` as it goes. Close it (or exhaust it) to free the cache.

        Raises: whatever a forward raises; the model is whole again afterwards.
        """
        run = self.begin(request, stats)
        with self._engine.session(run.capacity):
            while not run.finished:
                yield self.step(run)

    def begin(self, request: DecodeRequest, stats: DecodeStats) -> Run:
        """The request before its first step. Computes nothing."""
        stats.num_prompt_tokens = len(request.prompt_ids)
        stats.drafted_by_position = [0] * self._config.gamma
        stats.accepted_by_position = [0] * self._config.gamma
        capacity = len(request.prompt_ids) + request.max_new_tokens + self._config.gamma
        return Run(request, stats, list(request.prompt_ids), capacity)

    def step(self, run: Run) -> Emitted:
        """The prompt's own forward, then a round or the target alone; timed, the device synchronised around it.

        Must find `run.cached` tokens in the session's cache.
        """
        clock = _Clock(self._engine)
        if run.verdict is None:
            run.verdict = self._target_step(run.context, run.context)
            run.stats.prefill_s = clock.lap()
            return run.take([run.verdict.next_token], [TARGET_ONLY])
        if alone := self._wants_target_alone(run, run.verdict):
            run.verdict = self._target_step(run.context, run.context[-1:])
            run.stats.num_target_only += 1
            ids, origins = [run.verdict.next_token], [TARGET_ONLY]
        else:
            run.verdict, ids, origins = self._round(run)
        emitted = run.take(ids, origins)
        seconds = clock.lap()
        run.stats.decode_s += seconds
        run.stats.target_only_s += seconds if alone else 0.0
        return emitted

    def _wants_target_alone(self, run: Run, verdict: Verdict) -> bool:
        # With one token left there is nothing to gain from a draft: the target's own token ends the text.
        if self._config.gamma == 0 or run.remaining <= 1:
            return True
        return verdict.next_token_prob is not None and verdict.next_token_prob < self._config.target_threshold

    # Inference mode per step, not per session: it belongs to the thread, and a session stays open while the consumer of
    # the pieces runs its own code between them.
    @torch.inference_mode()
    def _target_step(self, context: Sequence[int], new_ids: Sequence[int]) -> Verdict:
        """The target's token after `context`, whose last `new_ids` are not in the cache yet. One forward, one sync."""
        ids = torch.tensor(list(new_ids), device=self._engine.device)
        logits = self._sampler.shape(self._engine.forward(ids), context)
        return self._verify(torch.empty(0, dtype=torch.long, device=logits.device), None, logits)

    @torch.inference_mode()
    def _round(self, run: Run) -> tuple[Verdict, list[int], list[str]]:
        """Draft, verify, commit. The cache ends up holding all of the context but the last emitted token."""
        engine, stats, context = self._engine, run.stats, run.context
        clock = _Clock(engine, enabled=run.request.profile)
        start = engine.cache.length
        draft = self._drafter.propose(context, min(self._config.gamma, run.remaining - 1))
        stats.draft_s += clock.lap()
        num_drafted = draft.ids.shape[0]
        last = torch.tensor(context[-1:], device=engine.device)
        logits = engine.forward(torch.cat([last, draft.ids]), num_logits=num_drafted + 1)
        verdict = self._verify(draft.ids, draft.probs, self._sampler.shape(logits, context, draft.ids))
        engine.cache.rollback_to(start + 1 + verdict.num_accepted)
        stats.verify_s += clock.lap()
        _count_round(stats, num_drafted, verdict.num_accepted)
        ids = [*draft.ids[: verdict.num_accepted].tolist(), verdict.next_token]
        last_origin = BONUS if verdict.num_accepted == num_drafted else RECOVERED
        return verdict, ids, [ACCEPTED] * verdict.num_accepted + [last_origin]

    def _verify(self, ids: torch.Tensor, probs: torch.Tensor | None, logits: torch.Tensor) -> Verdict:
        if self._sampler.greedy:
            return verify_greedy(ids, logits, with_prob=self._config.target_threshold > 0.0)
        target_probs = logits.softmax(dim=-1)
        draft_probs = target_probs[:0] if probs is None else probs
        return verify_sampled(ids, draft_probs, target_probs, self._sampler)


@dataclass
class Run:
    """One request under way: the text so far and whether it has ended."""

    request: DecodeRequest
    stats: DecodeStats
    context: list[int]
    """Prompt and emitted tokens."""
    capacity: int
    """Tokens that the cache must hold."""
    origins: list[str] = field(default_factory=list)
    """Of the emitted tokens."""
    verdict: Verdict | None = None
    """The latest one; None before the prompt's own forward."""
    finished: bool = False

    @property
    def cached(self) -> int:
        """Tokens in the cache between two steps: all but the last emitted one."""
        return 0 if self.verdict is None else len(self.context) - 1

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - self.stats.num_emitted

    def take(self, ids: list[int], origins: list[str]) -> Emitted:
        """Append tokens up to the first that ends the text; the rest is cut."""
        taken = 0
        for token in ids:
            self.context.append(token)
            self.stats.num_emitted += 1
            taken += 1
            if self._ends(token):
                self.finished = True
                break
        self.stats.num_cut += len(ids) - taken
        self.origins += origins[:taken]
        return Emitted(ids[:taken], origins[:taken])

    def _ends(self, token: int) -> bool:
        if token in self.request.eos_token_ids or self.remaining <= 0:
            return True
        return self.request.should_stop is not None and self.request.should_stop(self.context)


class _Clock:
    """Seconds between laps, the device synchronised before every read."""

    def __init__(self, engine: Engine, *, enabled: bool = True) -> None:
        self._engine = engine
        self._sync = enabled
        self.skip()

    def lap(self) -> float:
        before = self._start
        self.skip()
        return self._start - before

    def skip(self) -> None:
        """Start anew: time spent by whoever consumes the tokens is not decoding time."""
        if self._sync:
            self._engine.synchronize()
        self._start = time.perf_counter()


def _count_round(stats: DecodeStats, num_drafted: int, num_accepted: int) -> None:
    stats.num_rounds += 1
    stats.num_drafted += num_drafted
    stats.num_accepted += num_accepted
    stats.num_bonus += num_accepted == num_drafted
    stats.num_recovered += num_accepted < num_drafted
    for i in range(num_drafted):
        stats.drafted_by_position[i] += 1
        stats.accepted_by_position[i] += i < num_accepted
