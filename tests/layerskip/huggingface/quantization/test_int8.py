"""8-bit weights: the numbers of plain integer arithmetic, row by row; modules that are themselves again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.engines.native.layers import NativeLayers
from layerskip.huggingface import memory
from layerskip.huggingface.quantization import products
from layerskip.huggingface.quantization.modules import Int8Modules
from layerskip.huggingface.quantization.products import Int8Linear, rounded_rows
from tests.layerskip import zoo

NONE = SkipMask.none(zoo.NUM_LAYERS)
IN_INT8 = NONE.rounded(8)
ENGINES = [*zoo.NAMES, "llama fused"]


def by_hand(weight: torch.Tensor, bias: torch.Tensor | None, row: torch.Tensor) -> torch.Tensor:
    """In integers and float64, from the definition alone."""
    scales = weight.abs().amax(dim=1).double() / 127
    weights = (weight.double() / scales[:, None]).round().clamp(-127, 127).long()
    low, high = min(0.0, float(row.min())), max(0.0, float(row.max()))
    scale = (high - low) / (127 if products._REDUCED else 255)
    zero = round(-low / scale)
    activations = (row.double() / scale).round().long() + zero
    sums = weights @ (activations - zero)
    out = sums.double() * scales * scale
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inputs", [24, 130])
def test_products_are_those_of_integer_arithmetic(inputs: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(40, inputs, generator=generator)
    bias = torch.randn(40, generator=generator) if biased else None
    linear = Int8Linear(weight, bias)
    rows = torch.randn(64, inputs, generator=generator) * torch.logspace(-1, 3, 64)[:, None]
    rows[3].abs_()  # no negative number
    rows[4] = -rows[4].abs()
    several = linear(rows)
    assert linear.num_outputs == several.shape[1] == 40
    off = []
    for row, in_several in zip(rows, several, strict=True):
        alone, expected = linear(row[None])[0], by_hand(weight, bias, row).float()
        torch.testing.assert_close(in_several, alone, rtol=1e-2, atol=float(expected.abs().max()) * 1e-2)
        exact = float(expected.abs().max()) * 1e-5
        off += [(alone - expected).abs() > exact, (in_several - alone).abs() > exact]
    share = float(torch.cat(off).float().mean())
    assert share < 0.05, "a number at the border of two steps may fall to either side, no more than that"
    whole = rows @ weight.t() + (0.0 if bias is None else bias)
    assert 0 < float((several - whole).norm() / whole.norm()) < 0.03


def test_a_row_of_zeros_and_what_a_row_stands_among_change_nothing() -> None:
    linear = Int8Linear(torch.randn(8, 16), None)
    rows = torch.cat([torch.zeros(1, 16), torch.randn(1, 16), 1000 * torch.randn(1, 16)])
    assert not linear(rows)[0].any()
    assert torch.equal(rounded_rows(rows)[1], rounded_rows(rows[1:2])[0])


@zoo.each(ENGINES)
def test_a_draft_of_8_bits_is_near_the_target_and_not_the_target(name: str) -> None:
    model = zoo.layerskip_of(name)
    ids = torch.tensor(zoo.prompt_of(8))
    with model.engine.session(12):
        model.engine.forward(ids[:5])
        whole = model.engine.forward(ids[5:], num_logits=3).clone()
        model.engine.cache.rollback_to(5)
        rounded = model.engine.forward(ids[5:], IN_INT8, num_logits=3).clone()
        model.engine.cache.rollback_to(5)
        steps = torch.cat([model.engine.forward(one, IN_INT8).clone() for one in ids[5:].split(1)])
    assert 1e-4 < float((rounded - whole).norm() / whole.norm()) < 0.3
    torch.testing.assert_close(steps, rounded, rtol=1e-3, atol=0.1)


@zoo.few(ENGINES)
def test_greedy_output_is_the_models_and_its_modules_are_themselves_again(name: str) -> None:
    model = zoo.layerskip_of(name)
    own = dict(model.model.named_parameters())
    prompt = zoo.prompt_of(5)
    out = model.generate(prompt, config=DecodeConfig(skip_mask=IN_INT8, gamma=3), max_new_tokens=20)
    assert tuple(out.ids) == zoo.greedy_reference(name.removesuffix(" fused"), prompt)[:20]
    assert out.stats.num_accepted > 0.5 * out.stats.num_drafted
    assert all("forward" not in module.__dict__ for module in model.model.modules())
    assert dict(model.model.named_parameters()) == own


def test_modules_are_themselves_again_after_an_exception() -> None:
    model = zoo.layerskip_of("gpt2")
    with pytest.raises(IndexError), model.engine.session(8):
        model.engine.forward(torch.tensor([zoo.VOCAB]), IN_INT8)
    assert all("forward" not in module.__dict__ for module in model.model.modules())


def test_weights_are_made_once_before_the_clock() -> None:
    model = LayerSkipModel(zoo.build("llama"), engine="fused")
    config = DecodeConfig(skip_mask=IN_INT8.narrowed(20), gamma=3)
    model.generate(zoo.prompt_of(4), config=config, max_new_tokens=8)
    assert model.engine.num_preparations == 2, "the layers, and the head with fewer token ids"
    assert model.engine.preparation_s > 0
    model.generate(zoo.prompt_of(4), config=config, max_new_tokens=8)
    assert model.engine.num_preparations == 2


def test_where_it_cannot_be_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = LayerSkipModel(zoo.build("llama"), engine="fused")
    assert model.bits_refusal(8) is None
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 1000)
    with pytest.raises(ValueError, match=r"skip_mask: int8 needs a copy of the weights \(0 MiB, and 0 MiB are free\)"):
        model.generate(zoo.prompt_of(4), config=DecodeConfig(skip_mask=IN_INT8, gamma=3), max_new_tokens=8)
    monkeypatch.setattr(type(model.adapter), "int8_refusal", "a CPU or a CUDA device, got mps")
    with pytest.raises(ValueError, match="skip_mask: int8 drafts need a CPU or a CUDA device, got mps"):
        model.check_config(DecodeConfig(skip_mask=IN_INT8, gamma=3))


def test_four_bits_are_for_sublayers_compiled_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecodeConfig(skip_mask=NONE.rounded(4), gamma=3)
    monkeypatch.setattr(NativeLayers, "refusal", staticmethod(lambda *_: "no compiler"))
    for engine in ("eager", "fused"):
        model = LayerSkipModel(zoo.build("llama"), engine=engine)
        with pytest.raises(ValueError, match="skip_mask: int4 drafts need sublayers compiled for the CPU"):
            model.check_config(config)
        assert model.bits_refusal(8) is None


@zoo.each(ENGINES)
def test_every_architecture_has_layers_that_compute_in_8_bits(name: str) -> None:
    """Falcon's linear modules are of a class of their own, and all but its output embedding stayed as they were."""
    modules = Int8Modules(zoo.layerskip_of(name).adapter.layers, nn.Embedding(4, 4))
    modules.make(IN_INT8, slice(None))
    assert len(modules._twins) >= 4 * zoo.NUM_LAYERS


def test_what_is_no_linear_module_stays_as_it_is() -> None:
    modules = Int8Modules([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))], nn.Embedding(4, 4))
    assert modules.make(IN_INT8, slice(None)) == 1
    with modules.instead(IN_INT8, slice(None)):
        pass
