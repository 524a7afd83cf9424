"""Compiled layers: the same numbers, one compilation for each set of sizes, and no silent fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from layerskip import SkipMask
from layerskip.engines import EagerEngine, check_agreement
from layerskip.engines.compiled import CompiledFunctions
from layerskip.engines.cuda_graph.engine import CudaGraphEngine, GraphOptions
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import RerunRecorder
from layerskip.huggingface.adapter import ModelAdapter
from tests.layerskip import zoo

FUNCTIONS = 3
"""Before attention, after it with the MLP, and the MLP alone."""


def compiled_engine(adapter: ModelAdapter, backend: str = "eager") -> CudaGraphEngine:
    executor = LeanExecutor(FusedEngine(adapter), compiled=CompiledFunctions(backend))
    return CudaGraphEngine(adapter, executor, RerunRecorder(), GraphOptions(granule=32, min_visible=16))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "eager"),
        ("qwen2-sliding", "aot_eager"),
        ("qwen3", "eager"),
        pytest.param("mistral-sliding", "inductor", marks=pytest.mark.slow),
    ],
)
def test_logits_are_the_models_own(name: str, backend: str) -> None:
    adapter = ModelAdapter(zoo.build(name))
    engine = compiled_engine(adapter, backend)
    check_agreement(engine, EagerEngine(adapter), adapter)
    assert engine.executor.num_compilations == FUNCTIONS * len({1, 4})  # tokens of the forwards it compares


def test_masks_layers_and_visible_positions_share_what_is_compiled() -> None:
    engine = compiled_engine(ModelAdapter(zoo.build("mistral-sliding")))
    ids, mixed = torch.tensor(zoo.prompt_of(5)), SkipMask.from_sublayers(zoo.NUM_LAYERS, attention=[1], mlp=[2])
    with engine.session(32):
        engine.forward(ids)
        engine.forward(ids[:1], mixed)
        assert engine.executor.num_compilations == FUNCTIONS
        for mask in zoo.masks_of("mistral-sliding").values():
            engine.forward(ids[:1], mask.rounded(None))  # a CPU's products with 8-bit weights are not compiled
            engine.cache.rollback_to(5)
        engine.forward(torch.tensor(zoo.prompt_of(13)))
        sizes = {engine.num_visible_for(length) for length in (6, 19)}
        assert len(sizes) == 2
        compiled = engine.executor.num_compilations
        assert compiled == FUNCTIONS + 2  # of 13 tokens, without a mask, the MLP never runs alone
        engine.forward(ids[:1], mixed)
        assert engine.executor.num_compilations == compiled


def test_longer_buffers_compile_anew_what_writes_to_them() -> None:
    engine = compiled_engine(ModelAdapter(zoo.build("llama")))
    ids = torch.tensor(zoo.prompt_of(5))
    counts = []
    for capacity in (32, 32, 64):
        with engine.session(capacity):
            engine.forward(ids)
            engine.forward(ids[:1])
        counts.append(engine.executor.num_compilations)
    assert counts == [2, 2, 3]  # a mask that skips nothing never runs the MLP alone


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_each_set_of_sizes_has_a_limit_of_its_own_and_passing_it_is_an_error() -> None:
    compiled = CompiledFunctions("eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in range(1, 12):
            x = torch.arange(size)
            assert torch.equal(compiled.variant(double, size)(x), 2 * x)
            assert torch.equal(compiled.variant(double, size)(x + 1), 2 * x + 2)
        assert compiled.num_compilations == len(compiled.seconds) == 11
        with pytest.raises(FailOnRecompileLimitHit):
            compiled.variant(double, 3)(torch.ones(3))


def test_two_models_do_not_share_a_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (3, 4, 5):
            compiled = CompiledFunctions("eager")
            compiled.variant(double, 1)(torch.ones(size))
            assert compiled.num_compilations == 1


def test_the_uncompiled_layers_count_none() -> None:
    adapter: Any = ModelAdapter(zoo.build("llama"))
    assert LeanExecutor(FusedEngine(adapter)).num_compilations == 0
