"""The autoregressive and the speculative loop: one loop, on one model, cache, sampler and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from layerskip.config import DecodeConfig
from layerskip.device_round import DeviceRound, OffersRounds, RoundPlan
from layerskip.drafters import Drafter, LayerSkipDrafter
from layerskip.engines import Engine
from layerskip.engines.prefix import PrefixEngine, PrefixStates
from layerskip.preparation import Starts, plan_forwards
from layerskip.sampling import Sampler
from layerskip.stats import DecodeStats
from layerskip.step_clock import StepClock
from layerskip.verifier import Verdict, verify_greedy, verify_sampled

TARGET_ONLY, ACCEPTED, RECOVERED, BONUS = "target-only", "accepted", "recovered", "bonus"
"""Where an emitted token came from; the prompt's own forward counts as target-only."""


@dataclass(frozen=True)
class Emitted:
    """Tokens of one round (or one target-only step), in order, with the origin of each."""

    ids: list[int]
    origins: list[str]
    rejected: list[int] = field(default_factory=list)
    """Draft tokens in whose place the last token stands."""


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
        self._device_round = self._on_device(config.gamma) if config.gamma else None
        self._device_target = self._on_device(0)

    def _on_device(self, gamma: int) -> DeviceRound | None:
        """Rounds of up to gamma drafts that run on the device in one piece, if the engine offers that."""
        if not isinstance(self._engine, OffersRounds):
            return None
        config = self._config
        plan = RoundPlan(config.skip_mask, gamma, config.draft_threshold, with_prob=config.target_threshold > 0.0)
        return self._engine.make_round(plan, self._sampler)

    @property
    def config(self) -> DecodeConfig:
        return self._config

    def run(self, request: DecodeRequest, stats: DecodeStats) -> Iterator[Emitted]:
        """`begin`, then `complete`."""
        return self.complete(self.begin(request, stats))

    def complete(self, run: Run) -> Iterator[Emitted]:
        """Yields what each step of a run just begun emitted. Close it (or exhaust it) to free the cache.

        Raises: whatever a forward raises; the model is whole again afterwards.
        """
        with self._engine.session(run.capacity):
            self.prepare(run)
            while not run.finished:
                yield self.step(run)

    def begin(self, request: DecodeRequest, stats: DecodeStats) -> Run:
        """The request before its first step. Computes nothing."""
        stats.num_prompt_tokens = len(request.prompt_ids)
        stats.drafted_by_position = [0] * self._config.gamma
        stats.accepted_by_position = [0] * self._config.gamma
        stats.round_s_by_drafted = [0.0] * self._config.gamma
        capacity = len(request.prompt_ids) + request.max_new_tokens + self._config.gamma
        return Run(request, stats, list(request.prompt_ids), capacity)

    def prepare(self, run: Run) -> None:
        """Have the engine record or compile all that this run may need, before its first step and so before any clock.

        In a session, whose cache is still empty. Cost: nothing where the engine does neither, or has done it for an
        earlier run of such a length; else up to a tenth of a second for each recording.
        """
        starts = Starts.of(self._config, len(run.request.prompt_ids), run.request.max_new_tokens)
        if self._device_target is None:
            self._engine.prepare(plan_forwards(self._config, starts))
            return
        self._device_target.prepare(starts.alone)
        if self._device_round is not None:
            self._device_round.prepare(starts.rounds, apart=run.request.profile)

    def step(self, run: Run) -> Emitted:
        """The prompt's own forward, then a round or the target alone; timed, the device synchronised around it.

        Must find `run.cached` tokens in the session's cache, and everything prepared (see `prepare`).
        """
        clock = StepClock(self._engine)
        if run.verdict is None:
            run.verdict = self._target_step(run.context, run.context)
            run.stats.prefill_s = clock.lap()
            return run.take([run.verdict.next_token], [TARGET_ONLY])
        draft_ids: list[int] = []
        if alone := self._wants_target_alone(run, run.verdict):
            if self._device_target is not None:
                run.verdict = self._device_target.run(run.context[-1], 0).verdict
            else:
                run.verdict = self._target_step(run.context, run.context[-1:])
            run.stats.num_target_only += 1
            emitted = run.take([run.verdict.next_token], [TARGET_ONLY])
        else:
            device = self._device_round
            run.verdict, draft_ids = self._round(run) if device is None else self._round_on_device(device, run)
            emitted = _settle(run, draft_ids, run.verdict)
        seconds = clock.lap()
        run.stats.decode_s += seconds
        if alone:
            run.stats.target_only_s += seconds
        elif draft_ids:
            run.stats.round_s_by_drafted[len(draft_ids) - 1] += seconds
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
    def _round(self, run: Run) -> tuple[Verdict, list[int]]:
        """Draft, verify, commit: the verdict on these draft tokens.

        The cache ends up holding all of the context but the last emitted token.
        """
        engine, stats, context = self._engine, run.stats, run.context
        clock = StepClock(engine, waits=run.request.profile)
        start = engine.cache.length
        prefix = self._new_prefix()
        draft = self._drafter.propose(context, min(self._config.gamma, run.remaining - 1), prefix)
        stats.draft_s += clock.lap()
        num_drafted = draft.ids.shape[0]
        last = torch.tensor(context[-1:], device=engine.device)
        ids = torch.cat([last, draft.ids])
        if prefix is None:
            logits = engine.forward(ids, num_logits=num_drafted + 1)
        else:
            logits = cast(PrefixEngine, engine).verify_shared(ids, prefix)
        verdict = self._verify(draft.ids, draft.probs, self._sampler.shape(logits, context, draft.ids))
        engine.cache.rollback_to(start + 1 + verdict.num_accepted)
        stats.verify_s += clock.lap()
        return verdict, draft.ids.tolist()

    def _round_on_device(self, device_round: DeviceRound, run: Run) -> tuple[Verdict, list[int]]:
        """`_round` as one piece of device work; under `profile` as two, to time them apart."""
        clock = StepClock(self._engine, waits=run.request.profile)

        def after_draft() -> None:
            run.stats.draft_s += clock.lap()

        apart = after_draft if run.request.profile else None
        max_drafts = min(self._config.gamma, run.remaining - 1)
        result = device_round.run(run.context[-1], max_drafts, after_draft=apart)
        run.stats.verify_s += clock.lap() if run.request.profile else 0.0
        return result.verdict, result.draft_ids

    def _new_prefix(self) -> PrefixStates | None:
        """None where the config does not share, and where the engine cannot: the output is the same."""
        if not self._config.share_prefix or not isinstance(self._engine, PrefixEngine):
            return None
        return PrefixStates.of(self._config.skip_mask)

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
    rejected: dict[int, list[int]] = field(default_factory=dict)
    """Draft tokens thrown away, by the place of the emitted token that stands for them."""
    verdict: Verdict | None = None
    """The latest one; None before the prompt's own forward."""
    finished: bool = False

    @property
    def cached(self) -> int:
        """Tokens in the cache between two steps: all but the last emitted one."""
        return 0 if self.verdict is None else len(self.context) - 1

    @property
    def emitted_ids(self) -> list[int]:
        return self.context[len(self.request.prompt_ids) :]

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - self.stats.num_emitted

    def begin_as(self, other: Run) -> None:
        """Take over the prompt's own forward from a run of the same request that has made this one step."""
        self.verdict = other.verdict
        self.stats.prefill_s = other.stats.prefill_s
        self.take(other.emitted_ids, [TARGET_ONLY])

    def take(self, ids: list[int], origins: list[str], rejected: list[int] | None = None) -> Emitted:
        """Append tokens up to the first that ends the text; the rest is cut, and what it stands in for with it."""
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
        if taken < len(ids) or not rejected:
            return Emitted(ids[:taken], origins[:taken])
        self.rejected[len(self.origins) - 1] = rejected
        return Emitted(ids, origins, rejected)

    def _ends(self, token: int) -> bool:
        if token in self.request.eos_token_ids or self.remaining <= 0:
            return True
        return self.request.should_stop is not None and self.request.should_stop(self.context)


def _settle(run: Run, draft_ids: list[int], verdict: Verdict) -> Emitted:
    """Count a round and emit what it gave."""
    stats, num_drafted, num_accepted = run.stats, len(draft_ids), verdict.num_accepted
    stats.num_rounds += 1
    stats.num_drafted += num_drafted
    stats.num_accepted += num_accepted
    stats.num_bonus += num_accepted == num_drafted
    stats.num_recovered += num_accepted < num_drafted
    for i in range(num_drafted):
        stats.drafted_by_position[i] += 1
        stats.accepted_by_position[i] += i < num_accepted
    last_origin = BONUS if num_accepted == num_drafted else RECOVERED
    ids, origins = [*draft_ids[:num_accepted], verdict.next_token], [ACCEPTED] * num_accepted + [last_origin]
    return run.take(ids, origins, draft_ids[num_accepted:])
