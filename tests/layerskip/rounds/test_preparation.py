"""Everything that decoding records is recorded before the clock starts, and a clock that sees a recording refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, DecodeStats, SkipMask
from layerskip.decoding.loop import DecodeLoop, DecodeRequest
from layerskip.engines.compiled import CompiledFunctions
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import GraphPool, RerunRecorder
from layerskip.rounds.preparation import Starts, plan_forwards
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.rounds.test_sampling import VOCAB, TableEngine
from tests.layerskip.tape import engine_of, graph_model

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [2])


class LoggingEngine(TableEngine):
    """Notes the plans it was given and every forward that is run after the prompt's."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[Any] = []
        self.forwards: list[tuple[bool, int, int]] = []
        """(under a mask, tokens, tokens in the cache before)"""

    @contextmanager
    def session(self, capacity: int) -> Iterator[None]:
        with super().session(capacity):
            yield

    def prepare(self, plans: Any) -> None:
        assert self.cache.length == 0
        self.plans = list(plans)

    def forward(self, input_ids: torch.Tensor, mask: SkipMask | None = None, *, num_logits: int = 1) -> torch.Tensor:
        if self.cache.length:
            assert num_logits == (len(input_ids) if mask is None else 1)
            self.forwards.append((mask is not None, len(input_ids), self.cache.length))
        return super().forward(input_ids, mask, num_logits=num_logits)


def planned(plans: Sequence[Any]) -> set[tuple[bool, int, int]]:
    return {(plan.mask is not None, plan.num_tokens, start) for plan in plans for start in plan.starts}


@pytest.mark.parametrize("draft_threshold", [0.0, 0.6])
@pytest.mark.parametrize("target_threshold", [0.0, 0.5])
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_the_plans_are_the_forwards_that_decoding_may_run(
    gamma: int, draft_threshold: float, target_threshold: float
) -> None:
    """Over many drawn texts, every forward run was planned, and every one planned may be run."""
    config = DecodeConfig(
        skip_mask=SkipMask.from_layers(2, [1]),
        gamma=gamma,
        draft_threshold=draft_threshold,
        target_threshold=target_threshold,
    )
    sampler = Sampler(SamplingParams(do_sample=True, top_k=0), torch.Generator().manual_seed(0))
    for max_new_tokens in (1, 2, 3, 9):
        engine: Any = LoggingEngine()
        for first in range(100):
            prompt = [first % VOCAB, 1, 2]
            for _ in DecodeLoop(engine, config, sampler).run(DecodeRequest(prompt, max_new_tokens), DecodeStats()):
                pass
        assert set(engine.forwards) <= planned(engine.plans)
        kinds = [{kind[:2] for kind in kinds} for kinds in (engine.forwards, planned(engine.plans))]
        assert kinds[0] == kinds[1]
        assert draft_threshold or set(engine.forwards) == planned(engine.plans)  # with one, not all happen to be drawn


LOOKUP = {"method": "prompt_lookup", "max_match": 2, "min_match": 1, "gamma": 3}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "hybrid"])
@pytest.mark.parametrize("target_threshold", [0.0, 0.5])
def test_the_plans_hold_what_lookups_have_verified_too(alone: bool, target_threshold: float) -> None:
    settings: dict[str, Any] = {"target_threshold": target_threshold}
    if alone:
        lookup = {name: value for name, value in LOOKUP.items() if name != "gamma"}
        settings |= {"drafter": "prompt_lookup", "skip_mask": SkipMask.none(2), "gamma": 3, "lookup": lookup}
    else:
        settings |= {"drafter": "hybrid", "skip_mask": SkipMask.from_layers(2, [1]), "gamma": 2, "lookup": LOOKUP}
    config = DecodeConfig(**settings)
    sampler = Sampler(SamplingParams(do_sample=True, top_k=0), torch.Generator().manual_seed(0))
    engine: Any = LoggingEngine()
    looked_up = 0
    for first in range(60):
        stats, prompt = DecodeStats(), [first % VOCAB, 1, 2]
        for _ in DecodeLoop(engine, config, sampler).run(DecodeRequest(prompt, 9), stats):
            pass
        looked_up += stats.num_looked_up
    assert looked_up > 30
    assert set(engine.forwards) <= planned(engine.plans)


def test_rounds_start_while_two_tokens_are_wanted_and_the_target_alone_may_take_the_last() -> None:
    assert Starts.of(DecodeConfig(skip_mask=MASK, gamma=2), 5, 4) == Starts(rounds=range(5, 7), alone=range(7, 8))
    assert Starts.of(DecodeConfig.plain(4), 5, 4) == Starts(rounds=range(5, 5), alone=range(5, 8))
    assert not plan_forwards(DecodeConfig.plain(4), Starts.of(DecodeConfig.plain(4), 5, 1))


def random_config(draw: random.Random) -> DecodeConfig:
    gamma, by_weights = draw.choice([0, 1, 3, 5]), draw.choice([False, False, True])
    drawn: dict[str, Any] = {
        "gamma": gamma,
        "draft_threshold": draw.choice([0.0, 0.4]),
        "target_threshold": draw.choice([0.0, 0.35]),
    }
    if by_weights and gamma:
        weights = zoo.eagle_of("llama").branching(draw.choice([None, 4, 12]))
        siblings = draw.choice([0, 2]) if weights.tree_tokens is None else 0
        none = SkipMask.none(zoo.NUM_LAYERS)
        return DecodeConfig(drafter="eagle", skip_mask=none, draft_weights=weights, siblings=siblings, **drawn)
    branching = {"siblings": 2, "sibling_threshold": draw.choice([0.3, 1.0])} if gamma and draw.random() < 0.5 else {}
    return DecodeConfig(skip_mask=zoo.random_mask(zoo.NUM_LAYERS, draw), **drawn, **branching)


@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("sampled", [False, True])
def test_nothing_is_recorded_between_the_steps_of_a_text(sampled: bool, penalty: float) -> None:
    """Across sizes of the visible part, on the device and, with a penalty, on the host."""
    model, draw = graph_model("llama", RerunRecorder(), max_graphs=2), random.Random(1)
    stats = engine_of(model).pool.stats
    for case in range(24):
        arguments = {"do_sample": sampled, "seed": case, "repetition_penalty": penalty}
        prompt, budget = zoo.prompt_of(draw.choice([1, 9, 14])), draw.choice([1, 2, 24])
        stream = model.stream(prompt, config=random_config(draw), max_new_tokens=budget, **arguments)
        next(stream)
        recorded = stats.num_captures
        for _ in stream:
            assert stats.num_captures == recorded
        assert len(stream.output().ids) == budget
    assert stats.num_captures > 12


def test_all_that_a_text_needs_is_kept_until_it_ends() -> None:
    """More recordings than the pool may keep."""
    model, prompt = graph_model("llama", RerunRecorder(), max_graphs=3), zoo.prompt_of(9)
    config = DecodeConfig(skip_mask=MASK, gamma=5, draft_threshold=0.4)
    out = model.generate(prompt, config=config, max_new_tokens=20, do_sample=False)
    assert tuple(out.ids) == zoo.greedy_reference("llama", prompt)[:20]
    pool = engine_of(model).pool
    assert pool.stats.num_captures == len(pool) > 3
    model.generate(prompt, config=DecodeConfig(skip_mask=SkipMask.from_layers(4, [1]), gamma=2), max_new_tokens=9)
    assert len(pool) <= 3  # the bound holds again as soon as something else is recorded


def test_preparing_leaves_what_is_decoded_unchanged_and_costs_nothing_the_second_time() -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    engine, config = engine_of(model), DecodeConfig(skip_mask=MASK, gamma=3, draft_threshold=0.3)
    for _ in range(2):
        assert (
            tuple(model.generate(prompt, config=config, max_new_tokens=20).ids)
            == (zoo.greedy_reference("llama", prompt)[:20])
        )
        recorded = engine.pool.stats.num_captures
    loop, request = DecodeLoop(engine, config, Sampler(SamplingParams())), DecodeRequest(prompt, 20)
    run = loop.begin(request, DecodeStats())
    with engine.session(run.capacity):
        loop.prepare(run)
        assert engine.cache.length == 0
    assert engine.pool.stats.num_captures == recorded


def test_a_clock_refuses_a_lap_in_which_something_was_recorded() -> None:
    model = graph_model("llama", RerunRecorder())
    loop = DecodeLoop(model.engine, DecodeConfig(skip_mask=MASK, gamma=3), Sampler(SamplingParams()))
    run = loop.begin(DecodeRequest(zoo.prompt_of(5), 12), DecodeStats())
    with model.engine.session(run.capacity):
        loop.step(run)  # the prompt's own, which is not recorded
        with pytest.raises(RuntimeError, match="cuda_graph: recorded or compiled 1 times inside a timed region"):
            loop.step(run)
    assert run.stats.decode_s == 0.0


def test_layers_are_compiled_before_the_clock_starts() -> None:
    model, compiled = graph_model("llama", RerunRecorder()), CompiledFunctions(backend="eager")
    engine_of(model).executor = LeanExecutor(FusedEngine(model.adapter), compiled=compiled)
    prompt = zoo.prompt_of(9)
    stream = model.stream(prompt, config=DecodeConfig(skip_mask=MASK, gamma=3), max_new_tokens=20)
    next(stream)
    before = compiled.num_compilations
    assert before > 0
    for _ in stream:
        assert compiled.num_compilations == before
    assert tuple(stream.output().ids) == zoo.greedy_reference("llama", prompt)[:20]
    assert model.engine.num_preparations == before + engine_of(model).pool.stats.num_captures


def adder(total: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        total.add_(1)

    return work


def test_what_is_prepared_stays_until_it_is_let_go() -> None:
    pool, total = GraphPool(RerunRecorder(), max_graphs=2), torch.zeros(1)
    for key in ("a", "b", "c"):
        pool.prepare(key, adder(total), (total,))
    assert (len(pool), total.item(), pool.stats.num_captures) == (3, 0, 3)
    pool.play("d", adder(total), (total,))
    pool.play("e", adder(total), (total,))
    assert [key in pool for key in "abcde"] == [True, True, True, False, True]
    pool.let_go()
    pool.play("f", adder(total), (total,))
    assert [key in pool for key in "abcdef"] == [False] * 4 + [True, True]
