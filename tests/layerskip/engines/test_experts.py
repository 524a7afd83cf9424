"""Mixtures of experts by kernels: Transformers' logits for every way to choose, whatever a row is computed with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.skip_mask import DRAFT_BITS
from layerskip.engines.choice import make_engine
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.native import library
from layerskip.engines.native.experts import NativeExperts
from layerskip.engines.native.linear import NativeLinear
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from tests.layerskip import zoo

pytestmark = pytest.mark.skipif(isinstance(library.load_kernels(), str), reason="no kernels here")
NAMES = ("mixtral", "qwen3-moe", "glm4-moe", *zoo.SAME_PARTS)
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "qwen3-moe": {"norm_topk_prob": True, "num_experts": 16, "num_experts_per_tok": 5},
    "glm4-moe": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "lfm2-moe": {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "num_experts": 8},
    "granite-moe": {"residual_multiplier": 0.3, "num_local_experts": 8},
}
IDS = torch.tensor(zoo.prompt_of(70))


def built(name: str, **overrides: Any) -> ModelAdapter:
    """With preferences for some experts, where its class has them."""
    model = zoo.build(name, **overrides)
    generator = torch.Generator().manual_seed(7)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
    return ModelAdapter(model)


def compiled(adapter: ModelAdapter) -> FusedEngine:
    engine = FusedEngine(adapter, compiled=True)
    assert any(isinstance(mlp, NativeExperts) for _, mlp in engine.layers)
    return engine


def logits(engine: Any, sizes: list[int], mask: SkipMask | None = None) -> torch.Tensor:
    with engine.session(len(IDS)):
        return torch.cat([engine.forward(one, mask, num_logits=len(one)).clone() for one in IDS.split(sizes)])


@pytest.mark.parametrize("overrides", [False, True], ids=["plain", "variant"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_models(name: str, overrides: bool) -> None:
    if overrides and name not in VARIANTS:
        pytest.skip("has no other settings")
    adapter = built(name, **(VARIANTS[name] if overrides else {}))
    masks = [None, SkipMask.from_layers(zoo.NUM_LAYERS, [1]), SkipMask.from_sublayers(zoo.NUM_LAYERS, mlp=[0, 2])]
    for mask in masks:
        found = [logits(one, [17, 1, 1, 5, 46], mask) for one in (compiled(adapter), EagerEngine(adapter))]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_do_not_depend_on_what_it_is_computed_with(name: str, dtype: torch.dtype) -> None:
    adapter = ModelAdapter(built(name).model.to(dtype))
    engine, threads = compiled(adapter), torch.get_num_threads()
    for mask in (None, *(SkipMask.none(zoo.NUM_LAYERS).rounded(bits) for bits in DRAFT_BITS)):
        found = []
        try:
            for sizes, num_threads in (([1] * 70, 1), ([70], 2), ([6] * 11 + [4], 1), ([2, 7, 13, 1, 47], 2)):
                torch.set_num_threads(num_threads)
                found.append(logits(engine, sizes, mask))
        finally:
            torch.set_num_threads(threads)
        assert found[0].isfinite().all()
        assert all(torch.equal(one, found[0]) for one in found[1:])


def test_drafts_in_8_bits_compute_with_rounded_experts() -> None:
    adapter = built("qwen3-moe")
    engine = compiled(adapter)
    found = logits(engine, [70], SkipMask.none(zoo.NUM_LAYERS).rounded(8))
    for layer in adapter.layers:  # the shared model is not touched: this one is built here
        weights = [layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj]
        weights += [getattr(layer.self_attn, f"{one}_proj").weight for one in "qkvo"]
        for one in weights:
            scales = one.detach().abs().amax(dim=-1, keepdim=True) / 127
            one.data = (one.detach() / scales).round() * scales
    own = adapter.head.weight
    scales = own.detach().abs().amax(dim=-1, keepdim=True) / 127
    own.data = (own.detach() / scales).round() * scales
    torch.testing.assert_close(found, logits(EagerEngine(adapter), [70]), rtol=1e-2, atol=1e-2)


def test_whole_experts_are_read_in_place() -> None:
    adapter = built("mixtral")
    own = adapter.layers[1].mlp.experts
    experts = compiled(adapter).layers[1][1]
    assert [one.weights[0].data_ptr() for one in experts.gate_up] == [one.data_ptr() for one in own.gate_up_proj]
    assert [one.weights[0].data_ptr() for one in experts.down] == [one.data_ptr() for one in own.down_proj]
    assert all(isinstance(one, NativeLinear) and one.rows is not None for one in (*experts.gate_up, *experts.down))


@pytest.mark.parametrize("name", ["qwen3_5-moe", "lfm2-moe", "granite-moe", "qwen2-moe"])
def test_speculative_output_is_plain_decodings_in_bfloat16(name: str) -> None:
    model = LayerSkipModel(built(name).model.to(torch.bfloat16), engine="fused")
    drafted = 0
    for seed in range(6):
        prompt = zoo.prompt_of(6, seed=seed)
        plain = model.generate(prompt, max_new_tokens=60, config=DecodeConfig.plain(zoo.NUM_LAYERS))
        none = SkipMask.none(4)
        for mask, gamma in ((SkipMask.parse("4:1"), 3), (none.rounded(8), 6), (none.rounded(4), 4)):
            out = model.generate(prompt, max_new_tokens=60, config=DecodeConfig(skip_mask=mask, gamma=gamma))
            assert out.ids == plain.ids
            drafted += out.stats.num_drafted
    assert drafted > 300


def test_scores_that_are_no_numbers_choose_as_well() -> None:
    """What comes out is none either, and nothing else is touched."""
    adapter = built("glm4-moe", **VARIANTS["glm4-moe"])
    adapter.layers[0].mlp.gate.weight.data[:] = torch.nan
    assert logits(compiled(adapter), [70]).isnan().all()


def test_experts_in_other_number_formats_are_left_to_the_models_modules() -> None:
    adapter = built("qwen3-moe")
    for layer in adapter.layers:
        layer.mlp.experts.down_proj.data = layer.mlp.experts.down_proj.data.to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match="weights of float8_e4m3fn"):
        FusedEngine(adapter, compiled=True)


def test_experts_that_are_chosen_otherwise_are_left_to_the_models_modules() -> None:
    adapter = built("qwen3-moe")
    for layer in adapter.layers:
        layer.mlp.gate.__class__ = type("OtherRouter", (type(layer.mlp.gate),), {})
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForCausalLM: experts chosen by OtherRouter"):
        make_engine("fused", adapter)
    assert make_engine("auto", adapter).engine.name == "eager"
