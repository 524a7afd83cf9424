"""Draft logits against models edited by hand, and the model left whole whatever happens."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.huggingface import adapter as adapter_module
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from tests.layerskip import zoo

PROMPT, DRAFTED = 9, 6  # longer than the sliding windows, together and the prompt alone
CLOSE = {"atol": 5e-5, "rtol": 1e-4}
KINDS = ("none", "early exit", "interior", "alternating", "layer 0", "attention", "mlp", "mixture")


def edited_copy(name: str, mask: SkipMask) -> Any:
    """A model that computes what the draft should, by another way than the adapter's."""
    if zoo.architecture(name) in zoo.SHARING:
        return zoo.bypassed_copy(name, mask)
    return zoo.zeroed_copy(name, mask) if zoo.spec_of(name).sublayers else zoo.shortened_copy(name, mask)


@zoo.few(zoo.RUNS)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_draft_logits_equal_an_edited_models(name: str, kind: str) -> None:
    if kind not in zoo.masks_of(name):
        pytest.skip("this architecture skips whole layers alone")
    mask, engine = zoo.masks_of(name)[kind], zoo.layerskip_of(name)._engine
    ids = torch.tensor(zoo.prompt_of(PROMPT + DRAFTED))
    edited = edited_copy(name, mask)
    expected = edited(ids.unsqueeze(0), use_cache=False).logits[0]

    with engine.session(len(ids)):
        one_by_one = torch.cat([engine.forward(ids[i : i + 1], mask) for i in range(len(ids))])
        engine.cache.rollback_to(0)
        portions = ids.split([1, 7, 4, 3])
        chunks = torch.cat([engine.forward(portion, mask, num_logits=len(portion)) for portion in portions])
        assert engine.cache.length == len(ids)
    torch.testing.assert_close(one_by_one, expected, **CLOSE)
    torch.testing.assert_close(chunks, expected, **CLOSE)

    # The real use: the target wrote the prompt, the draft goes on from there, over what an earlier draft left behind.
    filled = DynamicCache(config=zoo.model_of(name).config)
    zoo.model_of(name)(ids[:PROMPT].unsqueeze(0), past_key_values=filled, use_cache=True)
    positions = torch.arange(PROMPT, len(ids)).unsqueeze(0)
    arguments = {"position_ids": positions} if "position_ids" in inspect.signature(edited.forward).parameters else {}
    expected = edited(ids[PROMPT:].unsqueeze(0), past_key_values=filled, use_cache=True, **arguments).logits[0]
    with engine.session(len(ids)):
        engine.forward(ids[:PROMPT])
        for portion in torch.full((DRAFTED,), 7).split(1):
            engine.forward(portion, mask)
        engine.cache.rollback_to(PROMPT)
        drafted = torch.cat([engine.forward(ids[i : i + 1], mask) for i in range(PROMPT, len(ids))])
        engine.cache.rollback_to(PROMPT)
        target = engine.forward(ids[PROMPT:], num_logits=DRAFTED)
    torch.testing.assert_close(drafted, expected, **CLOSE)
    full = zoo.model_of(name)(ids.unsqueeze(0), use_cache=False).logits[0, PROMPT:]
    torch.testing.assert_close(target, full, **CLOSE)
    if kind != "none":
        assert (drafted - full).abs().max() > 0.05, "the mask changes nothing, so the test shows nothing"


@zoo.each()
def test_what_may_be_skipped(name: str) -> None:
    adapter = zoo.layerskip_of(name).adapter
    assert adapter.layers == list(zoo.stack_of(zoo.model_of(name)))
    assert adapter.sublayers_skippable == (zoo.SPECS[name].sublayers,) * zoo.NUM_LAYERS
    sliding = zoo.SPECS[name].arguments.get("sliding_window")
    assert {window for window in adapter.windows if window is not None} == ({sliding} if sliding else set())


@pytest.mark.parametrize("a_layer", [True, False])
def test_windows_in_the_form_of_either_release_of_transformers(a_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transformers 5.17 answers with one dictionary for all layers, 5.23 with one a layer: with 5.17 every model was
    # refused, for want of a list of as many layers as the dictionary has keys.
    shared = {"sliding_window": zoo.WINDOW}
    arguments = [shared, {}, shared, {}] if a_layer else shared
    types = zoo.model_of("gemma3").config.layer_types
    monkeypatch.setattr(adapter_module, "get_layer_types_and_kwargs", lambda _config: (types, arguments))
    assert ModelAdapter(zoo.model_of("gemma3")).windows == (zoo.WINDOW, None, zoo.WINDOW, None)
    plain = ["full_attention"] * zoo.NUM_LAYERS, [{}] * zoo.NUM_LAYERS if a_layer else {}
    monkeypatch.setattr(adapter_module, "get_layer_types_and_kwargs", lambda _config: plain)
    assert ModelAdapter(zoo.model_of("llama")).windows == (None,) * zoo.NUM_LAYERS


def test_sublayers_of_a_post_norm_model_are_refused_apart() -> None:
    model = zoo.layerskip_of("opt-post-norm")
    with pytest.raises(ValueError, match="layer 1 of this model can only be skipped whole, got 4:0,a1"):
        model.adapter.check_mask(SkipMask.from_sublayers(4, attention=[0, 1], mlp=[0]))
    assert model.whole_layers_only == (True,) * 4
    assert zoo.layerskip_of("opt").whole_layers_only == (False,) * 4


def test_a_padding_token_of_zeros_does_not_hide_what_else_a_layer_adds() -> None:
    """As Transformers initialises it; of zeros every layer makes zeros, its sublayers skipped or not."""
    model = zoo.build("gemma4")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0.0
        model.model.embed_tokens_per_layer.weight[0] = 0.0
    assert ModelAdapter(model).sublayers_skippable == (False,) * zoo.NUM_LAYERS


def test_a_mask_for_another_layer_count_is_refused() -> None:
    with pytest.raises(ValueError, match="skip_mask: must have the model's 4 layers, got 5"):
        zoo.layerskip_of("llama").generate([1], config=DecodeConfig(skip_mask=SkipMask.none(5), gamma=1))


def gates_on(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


class PlantedError(Exception):
    pass


def fail_at(layer: nn.Module, call: int) -> Any:
    """A hook that raises at the layer's `call`-th forward from now on (0 = the next)."""
    calls = iter(range(1_000))

    def hook(*_: Any) -> None:
        if next(calls) == call:
            raise PlantedError

    return layer.register_forward_pre_hook(hook)


@pytest.mark.parametrize("call", range(9))
def test_an_exception_anywhere_leaves_the_model_whole(call: int) -> None:
    # Call 0 is the prompt; a round at gamma 3 is three drafts and a verification: every place of two rounds.
    model, prompt = zoo.layerskip_of("gemma3"), zoo.prompt_of(5)
    config = DecodeConfig(skip_mask=SkipMask.from_sublayers(4, attention=[1, 2], mlp=[1, 3]), gamma=3)
    before = list(zoo.model_of("gemma3").config.to_dict().items())
    hook = fail_at(model.adapter.layers[2], call)
    try:
        with pytest.raises(PlantedError):
            model.generate(prompt, max_new_tokens=24, config=config)
    finally:
        hook.remove()
    assert gates_on(model.model) == []
    assert not torch.is_inference_mode_enabled()
    assert list(zoo.model_of("gemma3").config.to_dict().items()) == before
    ids = torch.tensor([prompt])
    plain = model.model.generate(ids, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    assert plain == list(zoo.greedy_reference("gemma3", prompt)[:12])
    assert model.generate(prompt, max_new_tokens=12, config=config).ids == plain


@pytest.mark.parametrize("leave", ["break", "drop", "close", "unstarted"])
def test_leaving_a_stream_early_leaves_the_model_whole(leave: str) -> None:
    # "break" and "drop" once left the gates on until some later garbage collection, and the next call was refused.
    model, prompt = zoo.layerskip_of("llama"), zoo.prompt_of(5)
    config = DecodeConfig(skip_mask=SkipMask.alternating(4), gamma=3)
    stream = model.stream(prompt, max_new_tokens=20, config=config)
    if leave == "close":
        next(stream)
        next(stream)
        assert gates_on(model.model)
        stream.close()
        assert stream.output().ids == list(zoo.greedy_reference("llama", prompt)[: len(stream.output().ids)])
    elif leave == "break":
        for _ in stream:
            break
    elif leave == "drop":
        next(stream)
        del stream
    assert gates_on(model.model) == []
    assert not torch.is_inference_mode_enabled()
    assert model.generate(prompt, max_new_tokens=20, config=config).ids == list(
        zoo.greedy_reference("llama", prompt)[:20]
    )


def test_ctrl_c_while_the_gates_are_taken_off_leaves_the_model_whole() -> None:
    model, code = zoo.layerskip_of("llama"), ModelAdapter._detach.__code__
    source, first = inspect.getsourcelines(ModelAdapter._detach)
    line = first + next(i for i, text in enumerate(source) if "__dict__.pop" in text)

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is code and event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(zoo.prompt_of(5), max_new_tokens=4)
    finally:
        sys.settrace(before)
    assert gates_on(model.model) == []
    assert model.generate(zoo.prompt_of(5), max_new_tokens=4).ids == list(
        zoo.greedy_reference("llama", zoo.prompt_of(5))[:4]
    )


def test_a_second_run_on_the_same_model_is_refused() -> None:
    model = zoo.layerskip_of("llama")
    stream = model.stream(zoo.prompt_of(3), max_new_tokens=9)
    next(stream)
    with pytest.raises(RuntimeError, match="already decoding; one run at a time"):
        model.generate(zoo.prompt_of(3), max_new_tokens=2)
    rest = [token for piece in stream for token in piece.ids]
    assert [*stream.output().ids] == list(zoo.greedy_reference("llama", zoo.prompt_of(3))[:9])
    assert stream.output().ids[1:] == rest


def test_a_second_wrapper_of_a_model_that_is_decoding_is_refused() -> None:
    """Both would put gates on the same modules."""
    model = zoo.build("llama")
    first, second = (LayerSkipModel(model, engine="eager") for _ in range(2))
    stream = first.stream(zoo.prompt_of(3), max_new_tokens=9)
    next(stream)
    with pytest.raises(RuntimeError, match="already decoding; one run at a time"):
        second.generate(zoo.prompt_of(3), max_new_tokens=2)
    stream.close()
    assert gates_on(model) == []
    outs = [one.generate(zoo.prompt_of(3), max_new_tokens=9).ids for one in (first, second)]
    assert outs[0] == outs[1] == list(zoo.greedy_reference("llama", zoo.prompt_of(3))[:9])


def test_a_text_ends_where_longrope_changes_its_rotations() -> None:
    """Past that Transformers computes every earlier token anew."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 27.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    model = zoo.build("phi3", original_max_position_embeddings=24, rope_parameters=rope)
    wrapped, prompt = LayerSkipModel(model), list(zoo.prompt_of(10))
    assert wrapped.max_positions == 24
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False)[0, 10:].tolist()
    assert wrapped.generate(prompt, max_new_tokens=14).ids == expected
    with pytest.raises(ValueError, match=r"must fit the model's 24 positions, got 10 \+ 15"):
        wrapped.generate(prompt, max_new_tokens=15)


def test_forward_needs_the_gates() -> None:
    adapter = zoo.layerskip_of("llama").adapter
    with pytest.raises(RuntimeError, match=r"inside `with adapter\.attached"):
        adapter.forward(torch.tensor([1]), adapter.new_cache(1), num_logits=1)


def test_an_override_of_forward_set_by_someone_else_stays_and_runs() -> None:
    model = zoo.build("llama")
    attention = zoo.stack_of(model)[1].self_attn
    own, calls = attention.forward, []

    def overriding(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    attention.forward = overriding
    wrapped = LayerSkipModel(model, engine="eager")
    calls.clear()
    config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [1]), gamma=2)
    out = wrapped.generate(zoo.prompt_of(5), max_new_tokens=8, config=config)
    assert attention.forward is overriding
    assert gates_on(model) == ["model.layers.1.self_attn"]
    assert out.ids == list(zoo.greedy_reference("llama", zoo.prompt_of(5))[:8])
    assert len(calls) == 1 + out.stats.num_rounds + out.stats.num_target_only  # no call while drafting


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"evaluation mode \(call model.eval\(\)\)"):
        LayerSkipModel(zoo.build("llama").train())


TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0}
UNSUPPORTED = {
    "mamba": ("MambaConfig", {**TINY, "num_hidden_layers": 2}, "no layer has attention"),
    "mamba2": (
        "Mamba2Config",
        {**TINY, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
        "no layer has attention, whose keys tell a text's length",
    ),
    "minimax": (
        "MiniMaxConfig",
        {**TINY, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "block_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
        "refuses a cache of ours: ValueError: MiniMax uses cache of its own",
    ),
    "falcon-h1": ("FalconH1Config", {**TINY, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}, "'hybrid'"),
    "nemotron-h": (
        "NemotronHConfig",
        {**TINY, "layers_block_type": ["linear_attention", "mlp"] * 2},
        "type '(dummy|mlp)'",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_states_that_cannot_be_rolled_back_are_refused(kind: str) -> None:
    config_class, arguments, reason = UNSUPPORTED[kind]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**arguments)).eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        LayerSkipModel(model, engine="eager")
    assert gates_on(model) == []


def test_a_model_that_keeps_its_state_elsewhere_is_refused() -> None:
    # RWKV passed for a supported model: its config names no layer types, and it ignores the cache it is given, so that
    # every forward after the first saw one token without its past.
    config = transformers.RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="rwkv: layer 0 does not use the key-value cache"):
        LayerSkipModel(model, engine="eager")


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="t5: encoder-decoder models are not supported"):
        ModelAdapter(transformers.T5ForConditionalGeneration(config).eval())


def test_a_consumer_between_pieces_is_not_in_inference_mode() -> None:
    # The session held inference mode open over its yields: the caller's own tensors became inference tensors, and two
    # streams closed in another order than they were opened left the mode on for good, or failed inside the cache.
    streams = []
    for name in ("llama fused", "gemma3"):
        config = DecodeConfig(skip_mask=SkipMask.alternating(4), gamma=2)
        streams.append(zoo.layerskip_of(name).stream((1, 2, 3), max_new_tokens=9, config=config))
        next(streams[-1])
        assert not torch.is_inference_mode_enabled()
    streams[0].close()
    for _ in streams[1]:
        assert not torch.is_inference_mode_enabled()
    assert streams[1].output().ids == list(zoo.greedy_reference("gemma3", (1, 2, 3))[:9])
