"""The autoregressive and the speculative loop: one loop, on one model, cache, sampler and engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from layerskip.config.decode_config import DecodeConfig
from layerskip.config.skip_mask import SkipMask
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.decoding.stats import DecodeStats
from layerskip.decoding.step_clock import StepClock
from layerskip.drafters import Draft, Drafter, DraftOnDevice, DraftSession, TextStore, make_drafter
from layerskip.drafters.forced import MOST_FORCED, ForcedDrafter
from layerskip.engines import Engine
from layerskip.engines.batch import PROMPT_PIECE
from layerskip.engines.tree import DraftTree
from layerskip.rounds.device_round import DeviceRound
from layerskip.rounds.logprobs import TokenLogprobs
from layerskip.rounds.preparation import Starts, plan_forwards
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler
from layerskip.rounds.verifier import TreeDraft, Verdict, verify, verify_tree

LOG = logging.getLogger(__name__)

TARGET_ONLY, ACCEPTED, RECOVERED, BONUS = "target-only", "accepted", "recovered", "bonus"
LOOKED_UP = "looked-up"
"""Where an emitted token came from; the prompt's own forward counts as target-only. Accepted draft tokens are
`accepted` if they were computed and `looked-up` if they were found in text."""


@dataclass(frozen=True)
class Emitted:
    """Tokens of one round (or one target-only step), in order, with the origin of each."""

    ids: list[int]
    origins: list[str]
    rejected: list[int] = field(default_factory=list)
    """Draft tokens in whose place the last token stands, or accepted tokens of another branch and the last one."""
    rejected_from: int = -1
    """Index in `ids` of the token in whose place the first of them stood."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, where they were asked for."""


@dataclass(frozen=True)
class DecodeRequest:
    """One prompt and when to stop."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    should_stop: Callable[[Sequence[int]], bool] | None = None
    """Called with all ids (prompt and emitted) after each emitted token, in order; True ends the text there."""
    prefix_cache: PrefixCache | None = None
    """Earlier texts whose beginnings are not computed again; this one is added in the end."""
    prompt_logprobs: bool = False
    """Whether the sampler's log-probabilities are wanted of the prompt's tokens too."""


class DecodeLoop:
    """Decodes one request under a config.

    The output is token-identical to that of the target alone, sampled output to what it draws from the same generator;
    but for a config with a `lossy` rule, by which further draft tokens are accepted.
    Cost a round: the draft's, and one full forward over the drafted tokens, their siblings and one more. Memory: one
    cache of prompt + max_new_tokens + gamma positions, or as many as one round verifies.
    """

    def __init__(
        self,
        engine: Engine,
        config: DecodeConfig,
        sampler: Sampler,
        *,
        store: TextStore | None = None,
    ) -> None:
        """store: earlier texts that a suffix drafter may look into."""
        self._engine = engine
        self._config = config
        self._sampler = sampler
        self._drafter: Drafter | None = make_drafter(config, engine, sampler, store)
        if sampler.grammar is not None:
            # A recorded verification has as many tokens as the config says.
            most = config.max_gamma if engine.name == "cuda_graph" else MOST_FORCED
            self._drafter = ForcedDrafter(sampler.grammar, self._drafter, most)
        self._gamma = 0 if self._drafter is None else self._drafter.gamma
        self._with_prob = self._drafter is not None and self._drafter.needs_target_prob
        self._device_target = self._on_device(0)
        # A mask drafts on the device where that verifies, but siblings; what else drafts does on the host.
        all_on_host = config.draft_weights is not None or config.siblings > 0
        host_gamma = config.max_gamma if all_on_host else config.lookup_gamma
        self._device_verify = self._on_device(host_gamma) if host_gamma else None

    def _on_device(self, gamma: int) -> DeviceRound | None:
        """Verification of up to gamma drafts of the host's as one piece of device work, if the engine offers that."""
        plan = RoundPlan(SkipMask.none(self._config.skip_mask.num_layers), gamma, with_prob=self._with_prob)
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
        with self.session(run):
            self.prepare(run)
            try:
                while not run.finished:
                    yield self.step(run)
            except GeneratorExit:  # between two steps: the cache is as whole as at the end
                self._keep(run)
                raise
            else:
                self._keep(run)
            finally:
                self._sampler.end(len(run.context))
                run.drafting = None  # whoever keeps the output need not keep the caches

    def _keep(self, run: Run) -> None:
        if run.request.prefix_cache is None:
            return
        try:
            run.request.prefix_cache.keep(self._engine, run.context)
        except (RuntimeError, MemoryError) as error:  # the text is whole: it must not be lost for want of memory
            LOG.warning("a text was not kept for those that begin like it: %s: %s", type(error).__name__, error)

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Caches for a run, freed on exit: the engine's, and what the drafter needs besides."""
        own = nullcontext() if self._drafter is None else self._drafter.session(run.capacity)
        with self._engine.session(run.capacity), own:
            yield

    def begin(self, request: DecodeRequest, stats: DecodeStats) -> Run:
        """The request before its first step. Computes nothing."""
        stats.num_prompt_tokens = len(request.prompt_ids)
        stats.make_room(self._gamma)
        self._sampler.begin(len(request.prompt_ids))
        capacity = len(request.prompt_ids) + request.max_new_tokens + max(self._gamma, self._config.max_verified)
        drafting = None if self._drafter is None else self._drafter.begin()
        return Run(request, stats, list(request.prompt_ids), capacity, drafting)

    def prepare(self, run: Run) -> None:
        """Have the engine record or compile all that this run may need, before its first step and so before any clock.

        In a session, whose cache is still empty. Cost: nothing where the engine does neither, or has done it for an
        earlier run of such a length; else up to a tenth of a second for each recording.
        """
        config, request, with_grammar = self._config, run.request, self._sampler.grammar is not None
        starts = Starts.of(config, len(request.prompt_ids), request.max_new_tokens, with_grammar=with_grammar)
        if self._drafter is not None:  # first: what it says of hidden states is part of what is recorded
            self._drafter.prepare(starts)
        if self._device_target is None:
            self._engine.prepare(plan_forwards(config, starts, with_grammar=with_grammar))
        if self._device_target is not None:
            self._device_target.prepare(starts.alone)
        if self._device_verify is not None:
            self._device_verify.prepare_verify(starts.rounds)
        if config.branches:
            self._engine.prepare_trees(starts.rounds, config.max_verified)

    def step(self, run: Run) -> Emitted:
        """The prompt's own forward, then a round or the target alone; timed, the device synchronised around it.

        Everything must have been prepared (see `prepare`).
        """
        clock = StepClock(self._engine)
        if run.verdict is None:
            run.verdict = self._prefill(run)
            if self._engine.cache.keeps_rows:  # for those that begin like it and come before its end
                self._keep(run)
            run.stats.prefill_s = clock.lap()
            return run.take([run.verdict.next_token], [TARGET_ONLY], run.verdict.logprobs)
        settled = self._round(run, run.verdict)
        if settled is None:
            run.verdict = self._target_alone(run)
            run.stats.num_target_only += 1
            emitted = run.take([run.verdict.next_token], [TARGET_ONLY], run.verdict.logprobs)
            seconds = clock.lap()
            run.stats.target_only_s += seconds
        else:
            run.verdict = settled.verdict
            emitted = _settle(run, settled)
            seconds = clock.lap()
            run.stats.count_seconds(len(settled.draft_ids), seconds, looked_up=settled.looked_up)
        self._sampler.settle(len(run.context))
        run.stats.add_step(seconds, len(emitted.ids))
        return emitted

    # Inference mode per step, not per session: it belongs to the thread, and a session stays open while the consumer of
    # the pieces runs its own code between them.
    @torch.inference_mode()
    def _prefill(self, run: Run) -> Verdict:
        """The target's token after the prompt. One forward over what no earlier text has of it, one sync."""
        if run.request.prompt_logprobs:
            return self._prefill_in_pieces(run)
        if run.request.prefix_cache is not None:
            run.stats.num_cached = run.request.prefix_cache.fill(self._engine, run.context)
        return self._target_step(run.context, run.context[run.stats.num_cached :])

    def _prefill_in_pieces(self, run: Run) -> Verdict:
        """All of it with logits at every place, of which no more are held than of a piece."""
        prompt, size = run.context, PROMPT_PIECE
        for start in range(0, len(prompt), size):
            ids = torch.tensor(prompt[start : start + size], device=self._engine.device)
            logits = self._engine.forward(ids, num_logits=len(ids))
            run.prompt_logprobs += self._sampler.logprobs(logits, prompt[start + 1 : start + 1 + size])
        return self._choose(logits[-1:], prompt)

    @torch.inference_mode()
    def _target_alone(self, run: Run) -> Verdict:
        if self._device_target is not None:
            return self._device_target.run(run.context[-1], 0).verdict
        return self._target_step(run.context, run.context[-1:])

    def _target_step(self, context: Sequence[int], new_ids: Sequence[int]) -> Verdict:
        """The target's token after `context`, whose last `new_ids` are not in the cache yet. One forward, one sync."""
        ids = torch.tensor(list(new_ids), device=self._engine.device)
        return self._choose(self._engine.forward(ids), context)

    def _choose(self, logits: torch.Tensor, context: Sequence[int]) -> Verdict:
        """The target's token after `context`, by logits (1, V)."""
        nothing = torch.empty(0, dtype=torch.long, device=logits.device)
        shaped = self._sampler.shape(logits, context)
        verdict = verify(nothing, shaped, self._sampler, len(context), with_prob=self._with_prob)
        return self._with_logprobs(verdict, logits, [])

    def _with_logprobs(self, verdict: Verdict, logits: torch.Tensor, draft_ids: Sequence[int]) -> Verdict:
        """logits: (R, V), not shaped, of the verification's rows."""
        if self._sampler.num_logprobs is None:
            return verdict
        return replace(verdict, logprobs=self._sampler.logprobs(logits[verdict.rows], verdict.emitted(draft_ids)))

    @torch.inference_mode()
    def _round(self, run: Run, latest: Verdict) -> _Round | None:
        """Draft, verify, commit; None if nothing is drafted.

        The cache ends up holding all of the context but the last emitted token.
        """
        # With one token left there is nothing to gain from a draft: the target's own token ends the text.
        if run.drafting is None or run.remaining <= 1 or not self._engine.may_draft:
            return None
        start = time.perf_counter()  # not a `StepClock`, which would wait for the device
        draft = run.drafting.propose(run.context, run.remaining - 1, latest.next_token_prob)
        if draft is None:
            return None
        if isinstance(draft, DraftOnDevice):
            result = draft.round.run(run.context[-1], draft.max_drafts)
            return _Round(result.draft_ids, result.verdict, looked_up=False)
        drafted = time.perf_counter()
        verdict = self._verify_draft(draft, run.context)
        run.stats.draft_s += drafted - start
        run.stats.verify_s += time.perf_counter() - drafted
        num_siblings = 0 if draft.tree is None else draft.tree.num_siblings
        return _Round(draft.ids.tolist(), verdict, looked_up=draft.looked_up, num_siblings=num_siblings)

    def _verify_draft(self, draft: Draft, context: Sequence[int]) -> Verdict:
        """One target forward over the last emitted token, the draft and its siblings, what it accepts, the rollback."""
        engine = self._engine
        if draft.tree is not None:
            return self._verify_tree(draft.tree, context)
        if self._device_verify is not None:
            return self._device_verify.verify(context[-1], draft.ids)
        start = engine.cache.length
        draft_ids = draft.ids.to(engine.device)
        ids = torch.cat([torch.tensor(context[-1:], device=engine.device), draft_ids])
        logits = engine.forward(ids, num_logits=len(ids))
        shaped = self._sampler.shape(logits, context, draft_ids)
        verdict = verify(
            draft_ids, shaped, self._sampler, len(context), with_prob=self._with_prob, lossy=self._config.lossy
        )
        engine.cache.rollback_to(start + 1 + verdict.num_accepted)
        return self._with_logprobs(verdict, logits, draft.ids.tolist())

    def _verify_tree(self, tree: TreeDraft, context: Sequence[int]) -> Verdict:
        engine, cache = self._engine, self._engine.cache
        start, tree = cache.length, replace(tree, ids=tree.ids.to(self._engine.device))
        ids = torch.cat([tree.ids.new_tensor(context[-1:]), tree.ids])
        logits = engine.verify_tree(ids, DraftTree(tree.parents))
        verdict = verify_tree(tree, logits, self._sampler, context, with_prob=self._with_prob, lossy=self._config.lossy)
        if verdict.off_draft:
            rows = [start + one.row for one in verdict.off_draft]
            engine.keep_rows(rows, start + 1 + verdict.num_drafts_accepted)
        cache.rollback_to(start + 1 + verdict.num_accepted)
        return self._with_logprobs(verdict, logits, tree.ids[: tree.num_drafts].tolist())


@dataclass(frozen=True)
class _Round:
    """What was drafted, and the verdict on it."""

    draft_ids: list[int]
    verdict: Verdict
    looked_up: bool
    num_siblings: int = 0


@dataclass
class Run:
    """One request under way: the text so far and whether it has ended."""

    request: DecodeRequest
    stats: DecodeStats
    context: list[int]
    """Prompt and emitted tokens."""
    capacity: int
    """Tokens that the cache must hold."""
    drafting: DraftSession | None
    """None for plain decoding."""
    origins: list[str] = field(default_factory=list)
    """Of the emitted tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the emitted tokens, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens but the first, where they were asked for."""
    rejected: dict[int, list[int]] = field(default_factory=dict)
    """Draft tokens thrown away, by the place of the emitted token that stands for them."""
    verdict: Verdict | None = None
    """The latest one; None before the prompt's own forward."""
    finish_reason: str | None = None
    """Why the text ended: `eos`, `stop` for a stop string, or `length`; None as long as it goes on."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def emitted_ids(self) -> list[int]:
        return self.context[len(self.request.prompt_ids) :]

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - self.stats.num_emitted

    def take(
        self,
        ids: list[int],
        origins: list[str],
        logprobs: Sequence[TokenLogprobs] = (),
        rejected: list[int] | None = None,
        rejected_from: int = -1,
    ) -> Emitted:
        """Append tokens up to the first that ends the text; the rest is cut, and what it stands in for with it."""
        taken = 0
        for token in ids:
            self.context.append(token)
            self.stats.num_emitted += 1
            taken += 1
            self.finish_reason = self._reason_to_end(token)
            if self.finished:
                break
        self.stats.num_cut += len(ids) - taken
        own = list(logprobs[:taken])
        self.origins += origins[:taken]
        self.logprobs += own
        if taken < len(ids) or not rejected:
            return Emitted(ids[:taken], origins[:taken], logprobs=own)
        self.rejected[len(self.origins) + rejected_from] = rejected
        return Emitted(ids, origins, rejected, rejected_from, own)

    def _reason_to_end(self, token: int) -> str | None:
        if token in self.request.eos_token_ids:
            return "eos"
        if self.request.should_stop is not None and self.request.should_stop(self.context):
            return "stop"
        return "length" if self.remaining <= 0 else None


def _settle(run: Run, settled: _Round) -> Emitted:
    """Count a round and emit what it gave."""
    draft_ids, verdict, off_draft = settled.draft_ids, settled.verdict, settled.verdict.off_draft
    run.stats.count_round(
        len(draft_ids),
        verdict.num_accepted,
        looked_up=settled.looked_up,
        num_siblings=settled.num_siblings,
        num_hits=len(off_draft),
    )
    num_right = verdict.num_drafts_accepted
    last_origin = BONUS if off_draft or num_right == len(draft_ids) else RECOVERED
    origins = [LOOKED_UP if settled.looked_up else ACCEPTED] * verdict.num_accepted + [last_origin]
    ids, rejected = verdict.emitted(draft_ids), draft_ids[num_right:]
    return run.take(ids, origins, verdict.logprobs, rejected, -1 - len(off_draft))
