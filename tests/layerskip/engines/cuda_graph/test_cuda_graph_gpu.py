"""The CUDA-graph engine on a GPU: real captures, and the kernels of production. Reported, not asserted: their seconds.

Tests that need no capture run on the CPU too, where a recording is played by running its work again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.free_running import FreeRunning
from layerskip.analysis.identity import check_identity
from layerskip.decoding.loop import DecodeRequest
from layerskip.engines import EagerEngine, choice
from layerskip.engines.cuda_graph.engine import CudaGraphEngine, GraphOptions
from layerskip.engines.cuda_graph.static_lean import LeanExecutor
from layerskip.engines.fused import FusedEngine
from layerskip.engines.recording.graph_pool import RerunRecorder
from layerskip.engines.recording.recorder import CudaRecorder
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from layerskip.huggingface.rounding import logit_difference
from layerskip.rounds.round_work import RoundPlan
from layerskip.rounds.sampling import Sampler, SamplingParams
from tests.layerskip import zoo
from tests.layerskip.tape import engine_of, on_graphs

NEEDS_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
)
MASK = SkipMask.from_layers(zoo.NUM_LAYERS, [2])
MIXTURES = ("mixtral", "gpt-oss")
LEAN_AND_MODULES = ("llama", "mistral-sliding", "qwen3", "gemma3", "gpt2", *MIXTURES)
_WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 512}
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 64": ("llama", {"num_key_value_heads": 2, "head_dim": 64}),
    "heads of 128, one key head": ("llama", {"num_key_value_heads": 1, "head_dim": 128}),
    "normed heads of 128": ("qwen3", {"num_key_value_heads": 2, "head_dim": 128}),
    "window": ("mistral-sliding", {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 40}),
}
"""Shapes for which a GPU takes the kernels that real models run on; the zoo's own are too small for them."""
NEW_TOKENS = 28


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for every shape and number of tokens would take minutes; `test_kernels_gpu.py` has tests of that."""
    monkeypatch.setattr(choice, "_compiles", lambda _device: False)


def with_devices(test: Any) -> Any:
    return pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])(test)


def needs_cuda(test: Any) -> Any:
    for mark in NEEDS_CUDA:
        test = mark(test)
    return test


def of_shape(kernels: str, device: str, dtype: torch.dtype) -> LayerSkipModel:
    """On the graph engine, at its own sizes of buffers."""
    name, overrides = KERNELS[kernels]
    model = zoo.build(name, **_WIDE, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            # The zoo's numbers are for 32 inputs; more would make attention look at single tokens, and round roughly.
            if parameter.ndim == 2 and parameter is not model.model.embed_tokens.weight:
                parameter.mul_((32 / parameter.shape[1]) ** 0.5)
    model = model.to(device, dtype)
    if device == "cuda":
        return LayerSkipModel(model, engine="cuda_graph")
    sizes = GraphOptions()
    wrapped = LayerSkipModel(model, engine="eager")
    return on_graphs(wrapped, RerunRecorder(), lean=True, granule=sizes.granule, min_visible=sizes.min_visible)


def reference_of(model: LayerSkipModel, prompt: tuple[int, ...]) -> list[int]:
    """Hugging Face's own greedy continuation."""
    ids = torch.tensor([prompt], device=model.device)
    output: list[list[int]] = model.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    return output[0][len(prompt) :]


def configs_of(kernels: str) -> list[DecodeConfig]:
    draw, configs = random.Random(kernels), [DecodeConfig.plain(zoo.NUM_LAYERS)]
    for gamma, threshold in ((1, 0.0), (3, 0.0), (4, 0.4), (8, 0.0)):
        mask = zoo.random_mask(zoo.NUM_LAYERS, draw)
        configs.append(DecodeConfig(skip_mask=mask, gamma=gamma, draft_threshold=threshold))
    return [*configs, DecodeConfig(skip_mask=mask, gamma=4, siblings=3)]


def on_gpu(name: str, **overrides: Any) -> LayerSkipModel:
    """In float32; mixtures of experts in bfloat16, in which alone their products can be recorded."""
    dtype = torch.bfloat16 if name in MIXTURES else torch.float32
    return LayerSkipModel(zoo.build(name, **overrides).to("cuda", dtype), engine="cuda_graph")


@with_devices
@pytest.mark.parametrize("kernels", KERNELS)
def test_with_the_kernels_of_production_output_is_identical_in_float32(kernels: str, device: str) -> None:
    model = of_shape(kernels, device, torch.float32)
    for seed, length in enumerate((1, 70)):
        prompt = zoo.prompt_of(length, seed)
        expected = reference_of(model, prompt)
        for config in configs_of(kernels):
            assert model.generate(prompt, config=config, max_new_tokens=NEW_TOKENS).ids == expected, config


@with_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_free_running_gives_what_plain_decoding_gives(dtype: torch.dtype, device: str) -> None:
    """In bfloat16 too: both run the same steps of one token."""
    model = of_shape("window", device, dtype)
    for seed, length in enumerate((1, 70)):
        prompt = zoo.prompt_of(length, seed)
        plain = model.generate(prompt, max_new_tokens=NEW_TOKENS).ids
        run = FreeRunning(model.engine, DecodeRequest(prompt, NEW_TOKENS, frozenset([plain[-3]])), read_every=7)
        run.prepare()
        recorded = model.engine.num_preparations
        assert [token for some in run.run() for token in some] == plain[: plain.index(plain[-3]) + 1]
        assert model.engine.num_preparations == recorded


@with_devices
@pytest.mark.parametrize("kernels", KERNELS)
def test_with_the_kernels_of_production_bfloat16_differs_by_ties_alone(kernels: str, device: str) -> None:
    model, prompt = of_shape(kernels, device, torch.bfloat16), zoo.prompt_of(70)
    expected = reference_of(model, prompt)
    for config in configs_of(kernels):
        ids = model.generate(prompt, config=config, max_new_tokens=NEW_TOKENS).ids
        assert check_identity(model, prompt, ids, expected).lossless, config


@with_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_replayed_logits_are_the_models_own(kernels: str, dtype: torch.dtype, device: str) -> None:
    """In steps of one and of several tokens, far beyond a window's width, under masks and whole."""
    model = of_shape(kernels, device, dtype)
    eager, ids = EagerEngine(model.adapter), torch.tensor(zoo.prompt_of(90), device=device)
    for mask in (None, MASK, zoo.masks_of("llama")["mixture"]):
        rows = []
        for engine in (eager, model.engine):
            with engine.session(len(ids)):
                chunks = ids.split([60, 1, 1, 5, 1, 9, 1, 12])
                rows.append(torch.cat([engine.forward(one, mask, num_logits=len(one)).clone() for one in chunks]))
        difference, tolerance = logit_difference(rows[1], rows[0])
        assert difference <= tolerance / 4, mask


@with_devices
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_rounds_on_the_device_emit_what_the_host_loop_does(
    kernels: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same kernels, so to the bit: but for a text's end, where the device drafts more than the host does."""
    model, prompt = of_shape(kernels, device, dtype), zoo.prompt_of(70)
    drafted = accepted = 0
    for config in configs_of(kernels)[1:]:
        if config.draft_threshold and dtype != torch.float32:
            continue  # the host verifies fewer rows after an early stop, and those round differently
        on_device = model.generate(prompt, config=config, max_new_tokens=NEW_TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(CudaGraphEngine, "make_round", lambda *_: None)
            on_host = model.generate(prompt, config=config, max_new_tokens=NEW_TOKENS)
        same = NEW_TOKENS - config.gamma
        assert on_device.ids[:same] == on_host.ids[:same], config
        assert on_device.origins[:same] == on_host.origins[:same], config
        drafted, accepted = drafted + on_device.stats.num_drafted, accepted + on_device.stats.num_accepted
    assert 0 < accepted < drafted


@needs_cuda
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
        if config.gamma and case % 3 == 0:
            config = config.model_copy(update={"siblings": 2})
        ids = torch.tensor([prompt], device="cuda")
        expected = model.model.generate(ids, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        ids_out = model.generate(prompt, config=config, max_new_tokens=24).ids
        assert check_identity(model, prompt, ids_out, expected).lossless, config  # float32: the same ids


@with_devices
def test_trees_of_trained_weights_leave_the_output_as_it_is(device: str) -> None:
    """Drawn text too, and rows of accepted tokens are moved."""
    hf, weights, hits = zoo.build("llama").to(device), zoo.eagle_of("llama"), 0
    model = LayerSkipModel(hf, engine="cuda_graph" if device == "cuda" else "eager")
    if device == "cpu":
        on_graphs(model, RerunRecorder(), lean=True)
    for seed, tree_tokens in enumerate((None, 3, 12, 24)):
        own = weights.branching(tree_tokens)
        config = DecodeConfig(drafter="eagle", skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=5, draft_weights=own)
        for drawn in ({"do_sample": False}, {"do_sample": True, "seed": seed, "top_k": 0}):
            prompt = zoo.prompt_of(9, seed)
            plain, out = (
                model.generate(prompt, config=one, max_new_tokens=NEW_TOKENS, **drawn)
                for one in (DecodeConfig.plain(zoo.NUM_LAYERS), config)
            )
            assert out.ids == plain.ids
            hits += out.stats.num_sibling_hits
    assert hits > 0


@needs_cuda
@zoo.each(MIXTURES)
def test_a_mixture_in_float32_is_refused_and_the_device_stays_sound(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="_grouped_mm waits for the device"):
        LayerSkipModel(zoo.build(name).cuda(), engine="cuda_graph")
    assert torch.cuda.get_sync_debug_mode() == 0
    prompt = zoo.prompt_of(5)
    assert on_gpu("llama").generate(prompt, max_new_tokens=8).ids == list(zoo.greedy_reference("llama", prompt, 8))


@needs_cuda
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


@needs_cuda
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


@needs_cuda
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


@needs_cuda
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
