"""Layers on two devices: hidden states are handed on whatever is skipped; a cache layer is beside its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.step_times import StepTimer
from layerskip.analysis.teacher_forcing import ForcedText, make_teacher_forcing
from layerskip.huggingface.placement import Placement, UnsupportedModelError
from tests.layerskip import zoo
from tests.layerskip.two_devices import FIRST, SECOND, TwoDevices, dispatch

PROMPT = zoo.prompt_of(5)


@pytest.fixture
def devices() -> Iterator[TwoDevices]:
    with TwoDevices() as both:
        yield both


def of_module(name: str) -> torch.device:
    """Layers 0 and 1 on the first device, 2 and 3, with what follows them, on the second."""
    tail = name.rpartition(".")[2]
    if tail.isdecimal():
        return FIRST if int(tail) < 2 else SECOND
    return SECOND if tail in ("norm", "ln_f", "final_layer_norm", "lm_head") else FIRST


def alternating(name: str) -> torch.device:
    """Every hidden state is moved."""
    tail = name.rpartition(".")[2]
    return SECOND if tail.isdecimal() and int(tail) % 2 else FIRST


def spread(name: str, devices: TwoDevices, place: Any = of_module) -> LayerSkipModel:
    model = zoo.build(name)
    dispatch(model, devices, place)
    return LayerSkipModel(model)


def test_the_stand_in_refuses_what_two_devices_would(devices: TwoDevices) -> None:
    here, there = torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(2)
    assert (here + there.to(FIRST)).device == FIRST
    assert (2 * here).tolist() == [2.0, 2.0]
    assert torch.zeros_like(there).device == SECOND


def test_without_hooks_the_model_is_refused_and_would_fail(devices: TwoDevices) -> None:
    model = zoo.build("llama")
    dispatch(model, devices, of_module)
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    with pytest.raises(UnsupportedModelError, match="its weights lie on privateuseone:0, privateuseone:1, and nothing"):
        Placement.of(model)
    with pytest.raises(RuntimeError, match="same device"):
        model(torch.tensor([PROMPT], device=FIRST))


PLACED = [("llama", of_module)]
MORE = [
    ("gemma3", alternating),
    ("llama", alternating),
    ("gpt2", of_module),
    ("falcon-new", alternating),
    ("bloom", alternating),
    ("opt", of_module),
    ("gpt_neox", alternating),
]


@pytest.mark.parametrize(("name", "place"), PLACED + [pytest.param(*one, marks=pytest.mark.slow) for one in MORE])
def test_greedy_output_is_the_undispatched_models(name: str, place: Any, devices: TwoDevices) -> None:
    model = spread(name, devices, place)
    assert model.placement.devices == (FIRST, SECOND)
    assert not model.placement.is_offloaded
    assert model.engine_name == "eager"
    assert "not whole on one device: privateuseone:0, privateuseone:1" in model.engine_reason
    assert model.whole_layers_only == zoo.layerskip_of(name).whole_layers_only
    accepted = 0
    for kind, mask in zoo.masks_of(name).items():
        whole = mask.rounded(None)  # copies in 8 bits are for models on one CPU
        config = DecodeConfig(skip_mask=whole, gamma=3, target_threshold=0.2)
        out = model.generate(PROMPT, config=config, max_new_tokens=8)
        assert tuple(out.ids) == zoo.greedy_reference(name, PROMPT)[:8], kind
        accepted += out.stats.num_accepted
    assert accepted


def test_every_cache_layer_is_beside_its_weights(devices: TwoDevices) -> None:
    model = spread("llama", devices)
    with model.engine.session(8):
        model.engine.forward(torch.tensor(PROMPT, device=model.device))
        places = [(layer.keys.device, layer.values.device) for layer in model.engine.cache.layers]
    assert places == [(FIRST, FIRST)] * 2 + [(SECOND, SECOND)] * 2


def test_sampling_and_what_the_search_needs(devices: TwoDevices) -> None:
    model, mask = spread("llama", devices), SkipMask.from_sublayers(zoo.NUM_LAYERS, attention=[1, 2], mlp=[2, 3])
    config = DecodeConfig(skip_mask=mask, gamma=3)
    out = model.generate(PROMPT, config=config, max_new_tokens=12, do_sample=True, temperature=0.9, top_k=20)
    assert len(out.ids) == 12
    for one in (DecodeConfig.plain(zoo.NUM_LAYERS), config):
        ids = model.generate(PROMPT, config=one, max_new_tokens=12).ids
        assert tuple(ids) == zoo.greedy_reference("llama", PROMPT)[:12]
    texts = [ForcedText(PROMPT, zoo.greedy_reference("llama", PROMPT)[:12])]
    forcing = make_teacher_forcing(model, texts)
    assert forcing.keys == "target"
    theirs = make_teacher_forcing(zoo.layerskip_of("llama"), texts).read(mask, 2)
    assert (forcing.read(mask, 2).choices == theirs.choices).all()
    assert StepTimer(model, 3).verify_s(PROMPT, [1, 4])
    assert StepTimer(model, 3).draft_s(PROMPT, [mask], gamma=2, threshold=True)


def test_engines_that_need_one_device_refuse(devices: TwoDevices) -> None:
    model = zoo.build("llama")
    dispatch(model, devices, of_module)
    for engine in ("fused", "cuda_graph"):
        with pytest.raises(UnsupportedModelError, match=f"engine {engine}: .* is on privateuseone:0, privateuseone:1"):
            LayerSkipModel(model, engine=engine)
