"""Layers that keep a state in place of keys and values come back from every rollback, and say when they cannot."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from layerskip import DecodeConfig, LayerSkipModel, PrefixCache, SkipMask
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.huggingface.adapter import ModelAdapter, UnsupportedModelError
from layerskip.huggingface.recurrent import RecurrentLayer, in_short_chunks
from tests.layerskip import zoo

LEAN = tuple(f"{name} fused" for name in zoo.RECURRENT if name in zoo.COMPILED)
NONE, ROUNDED = SkipMask.none(zoo.NUM_LAYERS), SkipMask.parse(f"{zoo.NUM_LAYERS}:int8")
FAST = ("qwen3_5", "lfm2")
CLOSE = {"atol": 2e-4, "rtol": 1e-3}


def long_model(name: str) -> LayerSkipModel:
    model = zoo.build(zoo.architecture(name), max_position_embeddings=1_024)
    return LayerSkipModel(model, engine="fused" if name in LEAN else "eager")


def fresh_logits(model: LayerSkipModel, ids: list[int]) -> torch.Tensor:
    """Hugging Face's own, of the last token."""
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.tensor([ids]), use_cache=False).logits[0, -1:]
    return logits


@zoo.few(zoo.RECURRENT + LEAN, FAST)
@torch.inference_mode()
def test_any_order_of_rounds_leaves_what_the_text_alone_would(name: str) -> None:
    """Prompts long and short; drafts under masks and with 8-bit weights, taken back; verifications, taken back in part
    or not at all; plain steps."""
    model = long_model(name)
    engine = model.engine
    for seed in range(2):
        draw = random.Random(f"{name} {seed}")

        def tokens(count: int, draw: random.Random = draw) -> list[int]:
            return [draw.randrange(1, zoo.VOCAB) for _ in range(count)]

        ids = tokens(draw.choice((1, 2, 9, 150, 300)))
        with engine.session(900):
            engine.forward(torch.tensor(ids))
            for _ in range(25):
                for mask in draw.sample([*zoo.masks_of(name).values(), ROUNDED], draw.randrange(2)):
                    for token in tokens(draw.randrange(1, 6)):
                        engine.forward(torch.tensor([token]), mask)
                    engine.cache.rollback_to(len(ids))
                new = tokens(draw.choice((1, 1, 2, 5, 17)))
                logits = engine.forward(torch.tensor(new), num_logits=len(new))
                kept = draw.randrange(1, len(new) + 1) if len(new) > 1 else 1
                if len(new) > 1:
                    engine.cache.rollback_to(len(ids) + kept)
                ids += new[:kept]
                torch.testing.assert_close(logits[kept - 1 : kept], fresh_logits(model, ids), **CLOSE)
            for token in tokens(270):  # beyond what is kept of earlier rows
                ids.append(token)
                last = engine.forward(torch.tensor([token]))
            torch.testing.assert_close(last, fresh_logits(model, ids), **CLOSE)
            engine.cache.rollback_to(len(ids) - 100)
            ids = [*ids[:-100], 5]
            torch.testing.assert_close(engine.forward(torch.tensor([5])), fresh_logits(model, ids), **CLOSE)


@zoo.few(zoo.RECURRENT + LEAN, FAST)
@pytest.mark.parametrize("drafter", ["int8", "int8 and layers", "suffix", "layers", "hybrid"])
def test_decoding_is_plain_decoding(name: str, drafter: str) -> None:
    model, mask = zoo.layerskip_of(name), zoo.masks_of(name)["interior"]
    lookup = SuffixLookup(min_match=1)
    config = {
        "int8": DecodeConfig(skip_mask=ROUNDED, gamma=6),
        "int8 and layers": DecodeConfig(skip_mask=SkipMask.parse("4:2,int8"), gamma=4, draft_threshold=0.3),
        "suffix": DecodeConfig(drafter="suffix", skip_mask=NONE, gamma=6, lookup=lookup),
        "layers": DecodeConfig(skip_mask=mask, gamma=3),
        "hybrid": DecodeConfig(drafter="hybrid", skip_mask=mask, gamma=3, lookup=lookup),
    }[drafter]
    accepted = drafted = 0
    for seed in range(5):
        prompt = zoo.prompt_of(9, seed) * 2
        out = model.generate(prompt, max_new_tokens=zoo.LONGEST, config=config)
        assert out.ids == list(zoo.greedy_reference(name, prompt))
        accepted, drafted = accepted + out.stats.num_accepted, drafted + out.stats.num_drafted
    assert 0 < accepted < drafted or (accepted > 0 and drafter == "int8")


@zoo.few(["qwen3_5", *LEAN], FAST)
@torch.inference_mode()
def test_too_far_back_is_an_error(name: str) -> None:
    model = long_model(name)
    with model.engine.session(700):
        for _ in range(2):
            model.engine.forward(torch.ones(300, dtype=torch.long))
        with pytest.raises(RuntimeError, match="a layer's state at position 350 is not known any more"):
            model.engine.cache.rollback_to(350)
    with model.engine.session(700):
        for _ in range(300):
            model.engine.forward(torch.tensor([3]))
        with pytest.raises(RuntimeError, match="a layer's state at position 100 is not known any more"):
            model.engine.cache.rollback_to(100)


@torch.inference_mode()
def test_a_forward_that_does_not_come_to_its_end_is_taken_back() -> None:
    model, ids = zoo.layerskip_of("qwen3_5"), list(zoo.prompt_of(9))
    layers = model.adapter.layers
    with model.engine.session(20):
        model.engine.forward(torch.tensor(ids[:4]))
        hook = layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.engine.forward(torch.tensor(ids[4:7]))
        hook.remove()
        with pytest.raises(RuntimeError, match="stands at position 7, a forward begins at 4"):
            model.engine.forward(torch.tensor(ids[4:7]))
        model.engine.cache.rollback_to(4)
        found = model.engine.forward(torch.tensor(ids[4:]))
    torch.testing.assert_close(found, fresh_logits(model, ids), **CLOSE)


def test_a_few_rows_are_not_filled_up() -> None:
    layer = zoo.stack_of(zoo.model_of("qwen3_5"))[0].linear_attn
    file = transformers.models.qwen3_5.modeling_qwen3_5
    before = dict(vars(file))
    calls: list[tuple[int, int]] = []

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((query.shape[1], kwargs.get("chunk_size", 64)))
        return before["torch_chunk_gated_delta_rule"](query, *args, **kwargs)

    hidden = torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(0))
    file.torch_chunk_gated_delta_rule = counted
    try:
        with torch.inference_mode():
            expected = [layer(hidden[:, :count]) for count in (5, 70)]
            with in_short_chunks([layer]), in_short_chunks([layer]):
                found = [layer(hidden[:, :count]) for count in (5, 70)]
        assert file.torch_chunk_gated_delta_rule is counted
    finally:
        file.torch_chunk_gated_delta_rule = before["torch_chunk_gated_delta_rule"]
    assert calls == [(5, 64), (70, 64), (5, 5), (70, 64)]
    assert vars(file) == before
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@zoo.few(["qwen3_5", *LEAN], FAST)
def test_a_conversation_goes_on_from_whole_texts_alone(name: str) -> None:
    model, cache, prompt = zoo.layerskip_of(name), PrefixCache(1 << 20), zoo.prompt_of(8)
    first = model.generate(prompt, max_new_tokens=6, prefix_cache=cache)
    other = [*prompt, first.ids[0], 60 - first.ids[1], 3, 4]
    out = model.generate(other, max_new_tokens=6, prefix_cache=cache)
    assert (out.stats.num_cached, out.ids) == (0, model.generate(other, max_new_tokens=6).ids)
    whole = [*prompt, *first.ids, 9]
    for drafter in ("interior", "none"):
        config = DecodeConfig(skip_mask=zoo.masks_of("qwen3_5")[drafter], gamma=3)
        out = model.generate(whole, max_new_tokens=6, prefix_cache=cache, config=config)
        assert (out.stats.num_cached, out.ids) == (13, model.generate(whole, max_new_tokens=6).ids)
    few = PrefixCache(cache.num_bytes // 8)  # the states alone are larger
    for _ in range(2):
        assert model.generate(whole, max_new_tokens=6, prefix_cache=few).stats.num_cached == 0
    assert few.num_bytes == 0


def test_what_needs_keys_of_every_position_is_refused() -> None:
    model = zoo.layerskip_of("qwen3_5")
    said = "siblings and trees: need a model that can be told its tokens' positions and what each sees, in this one "
    with pytest.raises(ValueError, match=said + "layers keep a state in place of keys"):
        model.config = DecodeConfig(skip_mask=zoo.masks_of("qwen3_5")["interior"], gamma=3, siblings=2)
    with pytest.raises(UnsupportedModelError, match="Qwen3_5ForCausalLM has layers that keep a state, or read others"):
        ModuleExecutor(model.adapter)


def test_a_model_that_goes_on_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentLayer, "_restore", lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="after a rollback Qwen3_5ForCausalLM goes on otherwise, by 0"):
            ModelAdapter(zoo.model_of("qwen3_5"))
    assert ModelAdapter(zoo.model_of("qwen3_5")).recurrent_layers == {0: 1, 2: 1}
    # Transformers' Jamba goes on from a state with one token alone.
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": zoo.VOCAB}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_experts": 2, "mamba_d_state": 4, "pad_token_id": 0}
    kinds = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    jamba = transformers.JambaForCausalLM(transformers.JambaConfig(**heads, **sizes, **kinds)).eval()
    with torch.no_grad():
        for one in jamba.parameters():
            one *= 4 if one.ndim > 1 else 1
    with pytest.raises(UnsupportedModelError, match="after a rollback JambaForCausalLM goes on otherwise"):
        ModelAdapter(jamba)
