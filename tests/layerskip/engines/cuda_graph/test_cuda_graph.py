"""The CUDA-graph engine: all but the capture itself, its graphs played from a tape on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.engines import EagerEngine
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.engines.cuda_graph.static_step import num_visible_for
from layerskip.engines.recording.graph_pool import Replay, RerunRecorder
from layerskip.huggingface.adapter import UnsupportedModelError
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.engines.test_engines import logits_in_chunks
from tests.layerskip.tape import TapeRecorder, engine_of, graph_model

MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [2])


def assert_greedy(model: LayerSkipModel, prompt: tuple[int, ...], config: DecodeConfig, budget: int) -> None:
    out = model.generate(prompt, config=config, max_new_tokens=budget)
    assert tuple(out.ids) == zoo.greedy_reference("llama", prompt)[:budget]


# The same numbers and tokens.


@zoo.few(zoo.RECORDED)
def test_logits_are_the_models_own(name: str) -> None:
    """Replayed at other positions than recorded at, across windows and across sizes of the visible part."""
    model = graph_model(name)
    eager, ids = EagerEngine(model.adapter), torch.tensor(zoo.prompt_of(19))
    kinds = zoo.masks_of(name)
    for mask in (None, kinds["layer 0"], kinds["mixture"]):
        chunks = [3, 4, 1, 1, 4, 2, 4]
        expected = logits_in_chunks(eager, ids, chunks, mask)
        got = logits_in_chunks(model.engine, ids, chunks, mask)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=f"{name}, {mask}")


@zoo.each(("qwen2-sliding", "qwen3", "gemma2", "phi", "gpt2", "cohere2", "mixtral", "gpt-oss"))
def test_greedy_output_is_identical_to_generate(name: str) -> None:
    model, draw, accepted, drafted = graph_model(name), random.Random(name), 0, 0
    for case in range(3):
        prompt = zoo.prompt_of(draw.choice([1, 5, 9]), case)
        config = DecodeConfig(
            skip_mask=zoo.random_mask(zoo.NUM_LAYERS, draw),
            gamma=case + 1,
            draft_threshold=0.4 * (case == 1),
            target_threshold=0.3 * (case == 2),
        )
        out = model.generate(prompt, config=config, max_new_tokens=16)
        assert tuple(out.ids) == zoo.greedy_reference(name, prompt)[:16], config
        accepted, drafted = accepted + out.stats.num_accepted, drafted + out.stats.num_drafted
    assert 0 < accepted < drafted


def test_counters_are_those_of_the_host_loop() -> None:
    """On the same lean layers: what was drafted, accepted, cut and why each token is there."""
    graph, host = graph_model("qwen3", RerunRecorder()), zoo.layerskip_of("qwen3 fused")
    draw = random.Random(3)
    early, alone = 0, 0
    for case in range(40):
        prompt = zoo.prompt_of(draw.choice([1, 2, 5, 9]), case % 5)
        config = DecodeConfig(
            skip_mask=zoo.random_mask(zoo.NUM_LAYERS, draw),
            gamma=draw.choice([0, 1, 2, 4, 7]),
            draft_threshold=draw.choice([0.0, 0.3, 0.6]),
            target_threshold=draw.choice([0.0, 0.35]),
        )
        arguments: dict[str, Any] = {"max_new_tokens": draw.choice([1, 2, 7, 24]), "config": config}
        arguments["eos_token_id"] = draw.sample(range(zoo.VOCAB), 3)
        got, expected = (one.generate(prompt, **arguments) for one in (graph, host))
        assert (got.ids, got.origins, got.finish_reason) == (expected.ids, expected.origins, expected.finish_reason)
        assert got.stats.counters() == expected.stats.counters()
        early += config.draft_threshold > 0 and got.stats.num_drafted < got.stats.num_rounds * config.gamma
        alone += got.stats.num_target_only > 1 and config.gamma > 0
    assert early > 3
    assert alone > 3


@zoo.each(zoo.NOT_RECORDED)
def test_models_that_cannot_be_recorded_are_refused_with_the_reason(name: str) -> None:
    reason = "read as a number inside a static step" if name[:3] in ("opt", "fal") else "cannot be told its tokens' pos"
    with pytest.raises(UnsupportedModelError, match=rf"engine cuda_graph: \w+.* {reason}"):
        ModuleExecutor(zoo.layerskip_of(name).adapter)


# What is recorded, and how long it lasts.


def test_one_recording_a_mask_and_size_kept_from_text_to_text() -> None:
    model, prompt = graph_model("llama", granule=64), zoo.prompt_of(5)
    pool = engine_of(model).pool
    config = DecodeConfig(skip_mask=MASK, gamma=3)
    model.generate(prompt, config=config, max_new_tokens=24)
    # A round while 16 positions suffice, one when 32 do; the target alone for the last token.
    first = pool.stats.num_captures
    assert 2 <= first <= 4
    for seed in range(3):
        model.generate(zoo.prompt_of(5, seed), config=config, max_new_tokens=23)
    assert pool.stats.num_captures <= 4
    model.generate(prompt, config=DecodeConfig(skip_mask=SkipMask.from_layers(4, [1]), gamma=3), max_new_tokens=24)
    assert first < pool.stats.num_captures <= 6


def test_a_longer_text_voids_all_recordings_and_a_shorter_one_none() -> None:
    model, config = graph_model("llama", granule=16), DecodeConfig(skip_mask=MASK, gamma=2)
    engine, prompt = engine_of(model), zoo.prompt_of(5)
    recorder: Any = engine.pool._recorder
    for budget, voided in ((7, 0), (20, 1), (9, 0), (24, 0)):
        kept, before = len(engine.pool), engine.pool.stats.num_captures
        assert_greedy(model, prompt, config, budget)
        assert recorder.alive == len(engine.pool)
        recorded = engine.pool.stats.num_captures - before
        assert kept + recorded - len(engine.pool) == (kept if voided else 0)  # so many were dropped
    assert kept > 0
    engine.close()
    assert recorder.alive == len(engine.pool) == 0
    assert (
        tuple(model.generate(prompt, config=config, max_new_tokens=9).ids) == zoo.greedy_reference("llama", prompt)[:9]
    )


def test_a_thousand_masks_stay_within_the_bound() -> None:
    recorder = RerunRecorder()
    model = graph_model("llama", recorder, max_graphs=8)
    engine, draw, ids = engine_of(model), random.Random(0), torch.tensor(zoo.prompt_of(6))
    buffers = []
    with engine.session(24):
        engine.forward(ids)
        for _ in range(1_000):
            engine.forward(ids[:1], zoo.random_mask(zoo.NUM_LAYERS, draw))
            engine.cache.rollback_to(6)
            assert len(engine.pool) <= 8
            buffers.append({t.data_ptr() for layer in engine.cache.layers for t in (layer.keys, layer.values)})
        assert all(one == buffers[0] for one in buffers)
    assert engine.pool.stats.num_captures > 200
    assert engine.pool.stats.num_evictions == engine.pool.stats.num_captures - 8


@pytest.mark.parametrize(("needed", "expected"), [(1, 256), (256, 256), (257, 512), (1025, 2048), (2500, 3072)])
def test_visible_positions_are_a_power_of_two_or_all(needed: int, expected: int) -> None:
    assert num_visible_for(needed, 3072) == expected


# Buffers and their owners.


def test_logits_belong_to_the_caller() -> None:
    engine = graph_model("llama").engine
    ids = torch.tensor(zoo.prompt_of(9))
    with engine.session(12):
        engine.forward(ids[:5])
        first = engine.forward(ids[5:6])
        kept = first.clone()
        engine.cache.rollback_to(5)
        second = engine.forward(ids[7:8])
        assert torch.equal(first, kept)
        assert not torch.equal(first, second)


class Frozen:
    """A recorder whose replays do nothing, so that what is left is what runs outside of them."""

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        return RerunRecorder().record(lambda: None, ())


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_or_allocated_outside_the_recording() -> None:
    model = graph_model("llama", Frozen())
    engine, ids = engine_of(model), torch.tensor(zoo.prompt_of(9))
    sampler = Sampler(SamplingParams())
    rounds = engine.make_round(RoundPlan(MASK, 3), sampler)
    assert rounds is not None
    with torch.inference_mode(), engine.session(24):
        engine.forward(ids)
        rounds.run(1, 3)
        with Operations() as seen:
            engine.forward(ids[:1])
        # Inputs in, the position where it moved, logits out as a copy; views cost nothing.
        assert set(seen.names) <= {"copy_", "fill_", "clone", "slice"}
        engine.cache.rollback_to(9)
        rounds.run(1, 3)
        with Operations() as seen:
            rounds.run(5, 3)
        assert set(seen.names) <= {"fill_", "slice", "resolve_conj", "resolve_neg"}  # the last two are `tolist` asking


def test_nothing_of_an_earlier_text_shows() -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    engine, config = engine_of(model), DecodeConfig(skip_mask=MASK, gamma=3)
    with torch.inference_mode(), engine.session(24):
        engine.forward(torch.tensor(prompt))
        for layer in engine.cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    assert_greedy(model, prompt, config, 16)


def test_sessions_do_not_nest_and_capacity_is_a_clear_error() -> None:
    engine = engine_of(graph_model("llama"))
    one = torch.tensor([1])
    with pytest.raises(RuntimeError, match="no cache"):
        engine.forward(one)
    with engine.session(4):
        with pytest.raises(RuntimeError, match="one run at a time"), engine.session(4):
            pass
        with pytest.raises(RuntimeError, match="close its engine afterwards"):
            engine.close()
        engine.forward(torch.tensor([1, 2, 3]))
        rounds = engine.make_round(RoundPlan(MASK, 3), Sampler(SamplingParams()))
        with pytest.raises(ValueError, match="cache: capacity is 4 tokens, a round needs 7"):
            rounds.run(1, 3)
        engine.forward(one)
        with pytest.raises(ValueError, match="cache: capacity is 4 tokens, a forward needs 5"):
            engine.forward(one)
    with pytest.raises(ValueError, match="capacity: must be at least 1, got 0"), engine.session(0):
        pass


class FailsAt:
    """A recorder whose n-th replay raises halfway, its buffers in any state."""

    def __init__(self, at: int) -> None:
        self.left = at

    def record(self, work: Callable[[], None], preserve: Sequence[torch.Tensor]) -> Replay:
        replay = TapeRecorder().record(work, preserve)
        run = replay.__call__

        def fails() -> None:
            self.left -= 1
            if self.left == 0:
                for tensor in preserve:
                    tensor.fill_(3)
                raise RuntimeError("device lost")
            run()

        return _Wrapped(fails)


class _Wrapped:
    num_bytes = 0

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self) -> None:
        self._run()

    def release(self) -> None:
        pass


@pytest.mark.parametrize("draft_threshold", [0.0, 0.3])
def test_a_failed_replay_leaves_the_engine_usable(draft_threshold: float) -> None:
    model, prompt = graph_model("llama", FailsAt(3)), zoo.prompt_of(5)
    config = DecodeConfig(skip_mask=MASK, gamma=3, draft_threshold=draft_threshold)
    with pytest.raises(RuntimeError, match="device lost"):
        model.generate(prompt, config=config, max_new_tokens=16)
    assert_greedy(model, prompt, config, 16)
