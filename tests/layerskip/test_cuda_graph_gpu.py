"""The CUDA-graph engine on a GPU: real captures. Reported, not asserted: how long they take."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.adapter import ModelAdapter, UnsupportedModelError
from layerskip.device_round import RoundPlan
from layerskip.engines.cuda_graph import CudaGraphEngine, GraphOptions
from layerskip.engines.cuda_recorder import CudaRecorder
from layerskip.engines.fused import FusedEngine
from layerskip.engines.static_lean import LeanExecutor
from layerskip.identity import check_greedy
from layerskip.sampling import Sampler, SamplingParams
from tests.layerskip import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
]
MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [2])
MIXTURES = ("mixtral", "gpt-oss")
LEAN_AND_MODULES = ("llama", "mistral-sliding", "qwen3", "gemma3", "gpt2", *MIXTURES)


def on_gpu(name: str, **overrides: Any) -> LayerSkipModel:
    """In float32; mixtures of experts in bfloat16, in which alone their products can be recorded."""
    dtype = torch.bfloat16 if name in MIXTURES else torch.float32
    return LayerSkipModel(zoo.build(name, **overrides).to("cuda", dtype), engine="cuda_graph")


def engine_of(model: LayerSkipModel) -> CudaGraphEngine:
    assert isinstance(model.engine, CudaGraphEngine)
    return model.engine


@zoo.each(LEAN_AND_MODULES)
def test_greedy_output_is_identical_to_generate(name: str) -> None:
    model, draw = on_gpu(name), random.Random(name)
    for case in range(12):
        prompt = zoo.prompt_of(draw.choice([1, 5, 9]), case)
        config = DecodeConfig(
            skip_mask=zoo.random_mask(zoo.NUM_LAYERS, draw),
            gamma=draw.choice([0, 1, 2, 4, 7]),
            draft_threshold=draw.choice([0.0, 0.4]),
            target_threshold=draw.choice([0.0, 0.3]),
        )
        ids = torch.tensor([prompt], device="cuda")
        expected = model.model.generate(ids, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        ids_out = model.generate(prompt, config=config, max_new_tokens=24).ids
        assert check_greedy(model, prompt, ids_out, expected).lossless, config  # float32: the same ids


@zoo.each(MIXTURES)
def test_a_mixture_in_float32_is_refused_and_the_device_stays_sound(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="_grouped_mm waits for the device"):
        LayerSkipModel(zoo.build(name).cuda(), engine="cuda_graph")
    assert torch.cuda.get_sync_debug_mode() == 0
    prompt = zoo.prompt_of(5)
    assert on_gpu("llama").generate(prompt, max_new_tokens=8).ids == list(zoo.greedy_reference("llama", prompt, 8))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_does_not_wait_for_the_device(sampled: bool) -> None:
    model = on_gpu("llama")
    engine = engine_of(model)
    generator = torch.Generator("cuda").manual_seed(0)
    sampler = Sampler(SamplingParams(do_sample=sampled, top_k=9, top_p=0.9), generator)
    rounds = engine.make_round(RoundPlan(MASK, 3, with_prob=True), sampler)
    assert rounds is not None
    with engine.session(64):
        engine.forward(torch.tensor(zoo.prompt_of(5), device="cuda"))
        rounds.run(1, 3)
        read = rounds._read
        try:
            torch.cuda.set_sync_debug_mode("error")

            def read_freely(*arguments: Any) -> Any:
                torch.cuda.set_sync_debug_mode("default")
                return read(*arguments)

            rounds._read = read_freely  # type: ignore[method-assign]
            rounds.run(2, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_evicted_graphs_leave_the_others_whole() -> None:
    """Freeing one graph must not take the workspace that the others multiply in (pytorch issue 193402)."""
    adapter = ModelAdapter(zoo.build("llama", hidden_size=512, num_attention_heads=8, head_dim=64).cuda())
    executor, recorder = LeanExecutor(FusedEngine(adapter)), CudaRecorder(adapter.device)
    engine = CudaGraphEngine(adapter, executor, recorder, GraphOptions(max_graphs=6))
    draw, ids = random.Random(0), torch.tensor(zoo.prompt_of(6), device="cuda")
    with engine.session(64):
        engine.forward(ids)
        expected = engine.forward(ids[:1]).clone()
        for _ in range(200):
            engine.cache.rollback_to(6)
            engine.forward(ids[:1], zoo.random_mask(zoo.NUM_LAYERS, draw))
            torch.cuda.empty_cache()
            engine.cache.rollback_to(6)
            assert torch.equal(engine.forward(ids[:1]), expected)
    assert engine.pool.stats.num_evictions > 50


def test_memory_stays_within_the_bound() -> None:
    model, draw = on_gpu("llama"), random.Random(0)
    engine, ids = engine_of(model), torch.tensor(zoo.prompt_of(6), device="cuda")
    with engine.session(64):
        engine.forward(ids)
        free = []
        for i in range(1_000):
            engine.forward(ids[:1], zoo.random_mask(zoo.NUM_LAYERS, draw))
            engine.cache.rollback_to(6)
            if i % 250 == 249:
                free.append(torch.cuda.mem_get_info()[0])
    assert len(engine.pool) <= GraphOptions().max_graphs
    assert engine.pool.num_bytes <= GraphOptions().max_bytes
    assert free[0] - free[-1] <= 64 << 20, "memory grows from the 250th mask on"


def test_seconds_to_record_a_round_of_32_layers(record_property: Any) -> None:
    model = on_gpu("llama", num_hidden_layers=32, hidden_size=256)
    engine = engine_of(model)
    rounds = engine.make_round(RoundPlan(SkipMask.from_layers(32, range(8, 24)), 4), Sampler(SamplingParams()))
    assert rounds is not None
    with engine.session(64):
        engine.forward(torch.tensor(zoo.prompt_of(5), device="cuda"))
        before = engine.pool.stats.capture_s
        rounds.run(1, 4)
    seconds = engine.pool.stats.capture_s - before
    record_property("capture_s", seconds)
    print(f"a round of gamma 4 over 32 layers was recorded in {seconds:.3f} s (goal 0.5)")
    assert engine.pool.stats.num_captures > 0
