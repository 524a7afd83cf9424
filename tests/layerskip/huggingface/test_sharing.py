"""Layers that read the keys and values of earlier ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.benchmark.memory import step_bytes
from layerskip.engines.cuda_graph.static_modules import ModuleExecutor
from layerskip.huggingface.adapter import UnsupportedModelError
from tests.layerskip import zoo

CLOSE = {"atol": 2e-4, "rtol": 1e-3}


@zoo.each(zoo.SHARING)
@torch.inference_mode()
def test_a_skipped_layer_that_others_read_still_writes(name: str) -> None:
    """What a draft under a mask leaves in the cache of such a layer is what it makes of the draft's own states."""
    model, ids = zoo.layerskip_of(name), torch.tensor(zoo.prompt_of(9))
    mask, calls = SkipMask.from_layers(zoo.NUM_LAYERS, [0, 1, 2]), []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda *_, i=i: calls.append(i))
        for i, layer in enumerate(model.adapter.layers)
    ]
    try:
        with model.engine.session(9):
            model.engine.forward(ids[:8])
            calls.clear()
            model.engine.forward(ids[8:], mask)
            found = [layer.keys[:, :, 8].abs().sum().item() for layer in model.engine.cache.layers]
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == [0, 1, 3]  # the last layer reads the second one's keys
    assert len(found) == 2
    assert min(found) > 0


@pytest.mark.skipif("gemma4" not in zoo.COMPILED, reason="no kernels here")
@torch.inference_mode()
def test_over_kernels_it_writes_the_same() -> None:
    ids, mask = torch.tensor(zoo.prompt_of(9)), SkipMask.from_layers(zoo.NUM_LAYERS, [0, 1, 2])
    written = []
    for run in ("gemma4", "gemma4 fused"):
        engine = zoo.layerskip_of(run).engine
        with engine.session(9):
            engine.forward(ids[:8])
            engine.forward(ids[8:], mask)
            written.append([layer.states[:, :, :9].clone() for layer in engine.cache.layers])
    for one, other in zip(*written, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@zoo.each(["gemma4", *(one for one in ["gemma4 fused"] if "gemma4" in zoo.COMPILED)])
@torch.inference_mode()
def test_states_of_a_prompt_are_kept_of_all_its_tokens(name: str) -> None:
    """Transformers computes layers that read others' keys for those tokens alone whose logits are asked for."""
    model, ids = zoo.layerskip_of(name), torch.tensor(zoo.prompt_of(9))
    engine: Any = model.engine
    kept = []
    for num_logits in (1, 9):
        with engine.session(9):
            engine.keep_states((2,))
            logits = engine.forward(ids, num_logits=num_logits)
            kept.append((engine.states.clone(), logits[-1]))
    for one, other in zip(*kept, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@zoo.each(zoo.SHARING)
def test_what_they_do_without_and_what_is_refused(name: str) -> None:
    model = zoo.layerskip_of(name)
    assert model.adapter.num_keyed == 2
    layers = step_bytes(model).layers
    assert [layer.cached_token > 0 for layer in layers] == [True, True, False, False]
    with pytest.raises(UnsupportedModelError, match="or read others' keys, which is not recorded"):
        ModuleExecutor(model.adapter)
    config = DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 1), gamma=3)
    prompt = zoo.prompt_of(5)
    assert model.generate(prompt, max_new_tokens=20, config=config).ids == list(zoo.greedy_reference(name, prompt)[:20])


def test_several_states_a_token_are_refused_by_what_goes_on_from_one() -> None:
    with pytest.raises(ValueError, match="eagle goes on from one state a token, layers of gemma3n_text give 4"):
        zoo.eagle_of("gemma3n")
    weights = zoo.published_of("llama")
    with pytest.raises(ValueError, match="eagle goes on from one state a token, layers of gemma3n_text give 4"):
        zoo.layerskip_of("gemma3n").check_config(
            DecodeConfig(drafter="eagle", skip_mask=SkipMask.none(zoo.NUM_LAYERS), gamma=2, draft_weights=weights)
        )


def test_a_model_that_shares_none_has_as_many_as_layers() -> None:
    whole = zoo.build("gemma4", num_kv_shared_layers=0)
    config = DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=3)
    outputs = []
    for engine in ("eager", "fused") if "gemma4" in zoo.COMPILED else ("eager",):
        model = LayerSkipModel(whole, engine=engine)
        assert model.adapter.num_keyed == zoo.NUM_LAYERS
        out = model.generate(zoo.prompt_of(5), max_new_tokens=20, config=config)
        assert out.ids == model.generate(zoo.prompt_of(5), max_new_tokens=20).ids
        outputs.append(out.ids)
    assert outputs[1:] in ([], outputs[:1])
