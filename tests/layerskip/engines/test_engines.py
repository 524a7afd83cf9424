"""Engines: the fused layers give the model's own numbers, `auto` chooses by measurement and falls back aloud."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.config.draft_ids import name_of, pack_ids
from layerskip.engines import EagerEngine, check_agreement, choice, make_engine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean.layers import Norm
from layerskip.engines.lean.rotary import RotaryRows
from layerskip.engines.native import library
from layerskip.engines.native.layers import NativeLayers
from layerskip.huggingface import memory
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from tests.layerskip import zoo

FUSED = tuple(name for name in zoo.FUSED if name not in zoo.COMPILED)


def engines_of(name: str, *, compiled: bool = False, **overrides: Any) -> tuple[FusedEngine, EagerEngine]:
    adapter = ModelAdapter(zoo.build(name, **overrides))
    return FusedEngine(adapter, compiled=compiled), EagerEngine(adapter)


def logits_in_chunks(engine: Any, ids: torch.Tensor, chunks: list[int], mask: SkipMask | None) -> torch.Tensor:
    with engine.session(len(ids)):
        rows = [engine.forward(chunk, mask, num_logits=len(chunk)) for chunk in ids.split(chunks)]
        return torch.cat(rows).clone()


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(one, how, marks=() if how or one in ("llama", "gemma3") else pytest.mark.slow)
        for one in zoo.FUSED
        for how in (False, True)
        if how or one in FUSED
    ],
)
def test_fused_logits_are_the_models_own(name: str, compiled: bool) -> None:
    """Under every kind of mask, prompts and steps of every length, windows crossed; float32 to rounding."""
    fused, eager = engines_of(name, compiled=compiled)
    ids = torch.tensor(zoo.prompt_of(19))
    for kind, mask in zoo.masks_of(name).items():
        for chunks in ([19], [1] * 19, [7, 1, 1, 4, 2, 4], [2, 17]):
            expected = logits_in_chunks(eager, ids, chunks, mask)
            got = logits_in_chunks(fused, ids, chunks, mask)
            if mask.bits and compiled:
                continue  # activations are not rounded there: another draft than the modules'
            # Activations that differ by float32's rounding may be rounded to different ones of 256 steps.
            close = 0.1 if mask.bits else 1e-4
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=close, msg=f"{name}, {kind}, {chunks}")


@pytest.mark.parametrize(
    "overrides",
    [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}, {"hidden_act": "gelu"}],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
def test_fused_serves_llama_variants(overrides: dict[str, Any], compiled: bool) -> None:
    fused, eager = engines_of("llama", compiled=compiled, **overrides)
    ids = torch.tensor(zoo.prompt_of(11))
    mask = SkipMask.from_sublayers(zoo.NUM_LAYERS, attention=[1], mlp=[2])
    expected = logits_in_chunks(eager, ids, [5, 1, 5], mask)
    torch.testing.assert_close(logits_in_chunks(fused, ids, [5, 1, 5], mask), expected, rtol=1e-4, atol=1e-4)


LONG = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", {"attention_bias": True, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True}),
    ("qwen3_5", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 5}),
    (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    ),
    ("gemma3", {"hidden_activation": "silu", "layer_types": ["sliding_attention"] * 4}),
    ("gemma3", {"rope_parameters": {"full_attention": LONG, "sliding_attention": {**LONG, "rope_theta": 1e4}}}),
    ("smollm3", {"no_rope_layers": [0, 1, 0, 0], "attention_bias": True}),
    ("granite-hybrid", {"mamba_n_groups": 2, "mamba_proj_bias": True, "position_embedding_type": "rope"}),
    ("granite-hybrid", {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "mamba_conv_bias": False}),
    ("granite-hybrid", {"layer_types": ["attention"] * 4}),
    ("bamba", {"mamba_n_groups": 4, "mamba_d_state": 20, "mamba_n_heads": 4, "mamba_d_head": 16}),
    ("gemma4", {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("gemma4", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    ("gemma4", {"use_double_wide_mlp": True, "final_logit_softcapping": 2.0}),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize(("name", "overrides"), [one for one in VARIANTS if one[0] in zoo.FUSED], ids=str)
def test_variants_of_other_models(name: str, overrides: dict[str, Any], compiled: bool) -> None:
    if name in zoo.COMPILED and not compiled:
        pytest.skip("compiled alone")
    model = zoo.build(name, **overrides)
    for i, layer in enumerate(zoo.stack_of(model)):
        if hasattr(layer, "layer_scalar"):
            layer.layer_scalar.fill_(1.3 - 0.2 * i)
    adapter = ModelAdapter(model)
    fused, eager = FusedEngine(adapter, compiled=compiled), EagerEngine(adapter)
    ids = torch.tensor(zoo.prompt_of(19))
    for mask in (None, *zoo.masks_of(name).values()):
        if mask is None or not mask.bits:
            expected = logits_in_chunks(eager, ids, [7, 1, 1, 10], mask)
            torch.testing.assert_close(
                logits_in_chunks(fused, ids, [7, 1, 1, 10], mask), expected, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", zoo.COMPILED)
def test_what_is_not_compiled_of_them_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"needs sublayers compiled for a CPU$"):
        engines_of(name)
    with monkeypatch.context() as patch:
        patch.setenv("LAYERSKIP_KERNELS", "0")
        library.load_kernels.cache_clear()
        with pytest.raises(UnsupportedModelError, match="compiled for a CPU: switched off by LAYERSKIP_KERNELS=0"):
            make_engine("fused", ModelAdapter(zoo.model_of(name)))
        assert make_engine("auto", ModelAdapter(zoo.model_of(name))).engine.name == "eager"
    library.load_kernels.cache_clear()


@pytest.mark.skipif("qwen3_5" not in zoo.COMPILED, reason="no kernels here")
def test_linear_attention_with_other_parts_is_left_to_the_models_modules() -> None:
    for overrides, said in (
        ({"hidden_act": "gelu"}, "Qwen3_5ForCausalLM: linear attention with activations gelu and silu"),
        ({"head_dim": 1026}, "Qwen3_5TextModel with parts that are not compiled for a CPU"),
    ):
        adapter = ModelAdapter(zoo.build("qwen3_5", **overrides))
        with pytest.raises(UnsupportedModelError, match=said):
            FusedEngine(adapter, compiled=True)
        choice = make_engine("auto", adapter)
        assert (choice.engine.name, said in choice.reason) == ("eager", True)


@pytest.mark.parametrize("short", [True, False], ids=["CPU", "elsewhere"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_norms_are_the_models_own(name: str, short: bool) -> None:
    module = zoo.stack_of(zoo.build(name).bfloat16())[0].input_layernorm
    norm, x = Norm(module), 9 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm._short = short
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), module(x), rtol=1e-2, atol=1e-2)


def test_rollback_leaves_no_trace() -> None:
    """A rejected draft's keys and values are overwritten: the same continuation gives the same logits."""
    fused, _ = engines_of("mistral-sliding")
    ids = torch.tensor(zoo.prompt_of(14))
    with fused.session(20):
        fused.forward(ids[:9])
        clean = fused.forward(ids[9:12], num_logits=3).clone()
        fused.cache.rollback_to(9)
        fused.forward(torch.tensor([1, 2, 3, 4]), SkipMask.from_layers(zoo.NUM_LAYERS, [0, 2]))
        fused.cache.rollback_to(9)
        assert torch.equal(fused.forward(ids[9:12], num_logits=3), clean)


def test_the_model_itself_is_not_touched() -> None:
    model = zoo.build("llama")
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    LayerSkipModel(model, engine="fused").generate(zoo.prompt_of(4), max_new_tokens=4)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0], name
        assert torch.equal(tensor, before[name][1]), name


def test_runs_do_not_nest_and_forward_needs_a_session() -> None:
    fused, _ = engines_of("llama")
    with pytest.raises(RuntimeError, match="no cache"):
        fused.forward(torch.tensor([1]))
    with fused.session(4), pytest.raises(RuntimeError, match="one run at a time"), fused.session(4):
        pass
    with fused.session(2), pytest.raises(ValueError, match="capacity is 2 tokens, a forward needs 3"):
        fused.forward(torch.tensor([1, 2, 3]))


@pytest.mark.usefixtures("without_kernels")
def test_auto_takes_the_faster_engine_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ModelAdapter(zoo.build("llama"))
    for milliseconds, expected in (({"fused": 1.0, "eager": 2.0}, "fused"), ({"fused": 3.0, "eager": 2.0}, "eager")):
        monkeypatch.setattr(
            "layerskip.engines.choice._decode_and_verify_ms", lambda engine, _, ms=milliseconds: ms[engine.name]
        )
        choice = make_engine("auto", adapter)
        assert choice.engine.name == expected
        times = f"{milliseconds['fused']:.2f} ms fused, 2.00 ms eager"
        why = "; not compiled for this CPU: no C++ compiler" if expected == "fused" else ""
        assert choice.reason == f"one token and then four take {times}{why}"


@pytest.mark.parametrize(("seconds", "num_forwards"), [(0.02, 2), (0.0, 7)])
def test_an_engine_that_is_far_slower_is_timed_once(
    monkeypatch: pytest.MonkeyPatch, seconds: float, num_forwards: int
) -> None:
    engine = EagerEngine(ModelAdapter(zoo.build("llama")))
    counts: list[int] = []
    forward = engine.forward

    def counted(ids: torch.Tensor, **how: Any) -> torch.Tensor:
        counts.append(len(ids))
        time.sleep(seconds)
        return forward(ids, **how)

    monkeypatch.setattr(engine, "forward", counted)
    ms = choice._decode_and_verify_ms(engine, 2.0 if seconds else math.inf)
    assert counts[1:] == [1] * num_forwards + [4] * num_forwards
    assert ms >= 2000 * seconds


def test_where_fused_cannot_serve_auto_falls_back_aloud_and_asking_for_it_fails() -> None:
    adapter = ModelAdapter(zoo.build("gpt2"))
    choice = make_engine("auto", adapter)
    assert choice.engine.name == "eager"
    assert "supports LlamaModel" in choice.reason
    with pytest.raises(UnsupportedModelError, match="got GPT2Model"):
        make_engine("fused", adapter)
    with pytest.raises(ValueError, match="engine: must be one of auto, eager, fused, cuda_graph, got 'warp'"):
        make_engine("warp", adapter)


def test_where_memory_has_no_room_for_a_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read weights in place; torch needs the copy."""
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 1 << 10)
    adapter = ModelAdapter(zoo.build("llama"))
    if NativeLayers.refusal(adapter.device, adapter.dtype) is None:
        assert "which read the weights in place" in make_engine("fused", adapter).reason
    monkeypatch.setattr(NativeLayers, "refusal", staticmethod(lambda *_: "no compiler"))
    assert make_engine("auto", adapter).engine.name == "eager"
    with pytest.raises(UnsupportedModelError, match="needs a second copy of the weights"):
        make_engine("fused", adapter)


def test_a_model_that_sees_pictures_too_decodes_text_over_lean_layers() -> None:
    text = transformers.Gemma3TextConfig(**zoo.SPECS["gemma3"].arguments)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=4, patch_size=2)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma3Config(text_config=text, vision_config=vision)
    )
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    adapter = ModelAdapter(model.eval())
    engines = [FusedEngine(adapter, compiled=True), EagerEngine(adapter)]
    rows = [logits_in_chunks(one, torch.tensor(zoo.prompt_of(19)), [7, 1, 11], None) for one in engines]
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)


def test_positions_that_depend_on_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic'"):
        engines_of("llama", rope_parameters=rope)


def test_an_engine_with_wrong_numbers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, eager = engines_of("qwen3")
    check_agreement(fused, eager, ModelAdapter(zoo.build("qwen3")))
    fused._rotations = {}
    make = FusedEngine.rotations

    def unsigned(self: FusedEngine, num_positions: int) -> RotaryRows:
        return {name: (cos, sin.abs()) for name, (cos, sin) in make(self, num_positions).items()}

    monkeypatch.setattr(FusedEngine, "rotations", unsigned)
    with pytest.raises(UnsupportedModelError, match="its logits differ from the model's"):
        check_agreement(fused, eager, ModelAdapter(zoo.build("qwen3")))


class Shaken:
    """Logits of ones, off by so much under a mask; `alone`: in forwards over a single token."""

    name = "fused"

    def __init__(self, off: float, alone: float = 0.0) -> None:
        self._off, self._alone = off, alone

    def session(self, _capacity: int) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, ids: torch.Tensor, mask: SkipMask | None, *, num_logits: int) -> torch.Tensor:
        off = self._off + (self._alone if len(ids) == 1 else 0.0)
        return torch.full((num_logits, 4), 1.0 + (off if mask is not None else 0.0), dtype=torch.bfloat16)


def test_under_a_mask_an_engine_may_be_off_by_more_where_rounding_moves_the_reference_itself() -> None:
    adapter = ModelAdapter(zoo.build("llama"))
    for off, alone, passes in ((0.05, 0.0, True), (0.2, 0.0, False), (0.2, 0.2, True), (2.0, 0.2, False)):
        engine, reference = Shaken(off), Shaken(0.0, alone)
        context = nullcontext() if passes else pytest.raises(UnsupportedModelError, match="its logits differ")
        with context:
            check_agreement(engine, reference, adapter)  # type: ignore[arg-type]


@zoo.each(("llama", "llama fused", *(f"{name}" for name in sorted(zoo.NAMES) if name != "llama")))
def test_a_narrowed_draft_chooses_among_the_first_token_ids_or_those_of_a_set_alone(name: str) -> None:
    model = zoo.layerskip_of(name)
    whole = SkipMask.early_exit(zoo.NUM_LAYERS, 3)
    ids = torch.tensor(zoo.prompt_of(7))
    chosen = sorted({(7 * i + 3) % zoo.VOCAB for i in range(20)})
    packed = pack_ids(chosen)
    model.check_config(
        DecodeConfig(skip_mask=whole.narrowed(20, name_of(packed)), gamma=2, draft_ids={name_of(packed): packed})
    )
    found = {}
    by_set = [whole.narrowed(20, name_of(packed))]
    by_set += [by_set[0].rounded(8)] if model.bits_refusal(8) is None else []
    rounded = [whole.rounded(one.bits) for one in by_set]
    for mask in (whole, whole.narrowed(20), whole.narrowed(zoo.VOCAB), *rounded, *by_set, whole):
        with model.engine.session(16):
            model.engine.forward(ids[:4])
            found[mask] = model.engine.forward(ids[4:], mask, num_logits=2).clone()
    narrow = found[whole.narrowed(20)]
    assert narrow.shape == found[whole].shape == (2, zoo.VOCAB)
    torch.testing.assert_close(narrow[:, :20], found[whole][:, :20], rtol=1e-4, atol=1e-4)
    assert (narrow[:, 20:] == -torch.inf).all()
    for mask, own in zip(by_set, rounded, strict=True):
        torch.testing.assert_close(found[mask][:, chosen], found[own][:, chosen], rtol=1e-4, atol=1e-4)
        assert (found[mask] == -torch.inf).sum(dim=-1).tolist() == [zoo.VOCAB - 20] * 2
    torch.testing.assert_close(found[whole.narrowed(zoo.VOCAB)], found[whole], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=f"draft_vocab must be at most the model's {zoo.VOCAB}, got 99"):
        model.check_config(DecodeConfig(skip_mask=whole.narrowed(99), gamma=2))
    for mask, said in (
        (whole.narrowed(20, "0" * 8), "the set 00000000 must be among the config's draft_ids, it is not"),
        (whole.narrowed(19, name_of(packed)), "draft_vocab must be the 20 of its draft_ids, got 19"),
    ):
        with pytest.raises(ValueError, match=f"skip_mask: {said}"):
            model.check_config(DecodeConfig(skip_mask=mask, gamma=2))


def test_the_output_embedding_is_whole_again_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.layerskip_of("gemma2")
    head = model.model.get_output_embeddings()
    before = head.weight
    with pytest.raises(IndexError), model.engine.session(8):
        model.engine.forward(torch.tensor([zoo.VOCAB]), SkipMask.none(zoo.NUM_LAYERS).narrowed(9))
    assert head.weight is before
    monkeypatch.setattr(type(model.adapter), "can_narrow", False)
    with pytest.raises(ValueError, match="draft_vocab needs a plain output embedding"):
        model.check_config(DecodeConfig(skip_mask=SkipMask.none(zoo.NUM_LAYERS).narrowed(9), gamma=2))
