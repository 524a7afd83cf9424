"""Models whose own weights have 8 or 4 bits: what is decoded is what their `generate` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import TorchAoConfig

from layerskip import DecodeConfig, LayerSkipModel, Provenance, SkipMask
from layerskip.config.decode_config import QuantizationName
from layerskip.engines.lean import weight_layout
from layerskip.engines.lean.weight_layout import TorchLayers
from layerskip.engines.native.library import load_kernels
from layerskip.engines.native.linear import NativeLinear
from layerskip.huggingface.adapter import UnsupportedModelError
from layerskip.huggingface.quantization.weights import (
    GROUP,
    Int4Weights,
    joined_quantized,
    quantize,
    quantized_weights,
    stored_bytes,
)
from layerskip.interop.draft_checkpoint import write_draft_checkpoint
from tests.layerskip import zoo

torchao = pytest.importorskip("torchao.quantization", reason="needs the extra `quantized`")
MappingType = pytest.importorskip("torchao.quantization.quant_primitives").MappingType
KERNELS = load_kernels()
needs_kernels = pytest.mark.skipif(isinstance(KERNELS, str), reason=f"kernels for a CPU: {KERNELS}")
MASKS = (SkipMask.from_layers(zoo.NUM_LAYERS, [2]), SkipMask.early_exit(zoo.NUM_LAYERS, 3).narrowed(zoo.VOCAB // 2))


INT8 = torchao.Int8WeightOnlyConfig()


def int4(size: int = GROUP, mapping: Any = MappingType.ASYMMETRIC) -> Any:
    return torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(size), mapping)


def linear_of(rows: int, inputs: int, dtype: torch.dtype, rule: Any = INT8) -> nn.Linear:
    torch.manual_seed(rows)
    linear = nn.Linear(inputs, rows, bias=False).to(dtype)
    with torch.no_grad():
        linear.weight += 0.02  # not centred
    torchao.quantize_(linear, rule)
    return linear


def whole_weights(linear: nn.Linear) -> torch.Tensor:
    """What the stored numbers say, in float64."""
    own: Any = linear.weight
    scales, zeros = (
        one.double().repeat_interleave(own.qdata.shape[1] // one.shape[1], dim=1) if one is not None else 0.0
        for one in (own.scale.to(own.dtype), own.zero_point)
    )
    whole: torch.Tensor = (own.qdata.double() - zeros) * scales
    return whole


def quantized(name: str, to: QuantizationName = "int8", **settings: Any) -> LayerSkipModel:
    model = zoo.build(name)
    quantize(model, to)
    return LayerSkipModel(model, **settings)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rule", "inputs"),
    [(INT8, 48), (INT8, 131), (int4(), 96), (int4(128), 1280), (int4(64, MappingType.SYMMETRIC), 64)],
    ids=["int8", "int8 odd", "int4", "int4 in larger groups", "int4 without zeros"],
)
def test_products_are_those_of_the_stored_numbers_whatever_they_stand_among(
    rule: Any, inputs: int, dtype: torch.dtype
) -> None:
    one, other = linear_of(40, inputs, dtype, rule), linear_of(23, inputs, dtype, rule)
    order = torch.randperm(63)
    linear = NativeLinear.of(KERNELS, [one.weight.detach(), other.weight.detach()], None, order)  # type: ignore[arg-type]
    x = torch.randn(13, inputs).to(dtype)
    x[3] *= 1000
    found = linear(x)
    # Of float32 activations stay whole; in bfloat16 they are rounded to 16 bits of their largest.
    right = x.double() @ torch.cat([whole_weights(one), whole_weights(other)])[order].t()
    off = ((found.double() - right).norm(dim=1) / right.norm(dim=1)).max()
    assert float(off) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(found, torch.cat([linear(row[None]) for row in x]))
    assert torch.equal(linear.first(17)(x), found[:, :17])


def test_what_is_stored_is_read_and_all_else_is_not() -> None:
    linear = linear_of(8, 16, torch.bfloat16)
    stored = quantized_weights(linear.weight)
    assert stored is not None
    assert torch.equal(stored.numbers, linear.weight.qdata)
    torch.testing.assert_close(stored.scales, linear.weight.scale.flatten(), rtol=4e-3, atol=0)
    assert stored_bytes(linear.weight) == 8 * 16 + 8 * 4
    plain = nn.Linear(16, 8)
    assert quantized_weights(plain.weight) is None
    assert stored_bytes(plain.weight) == 8 * 16 * 4
    small = linear_of(8, 64, torch.bfloat16, int4())
    assert isinstance(quantized_weights(small.weight), Int4Weights)
    assert stored_bytes(small.weight) == 8 * 32 + 8 * 2 * 3, "half a byte each, and for 32 a scale and a zero"
    for other in (plain, linear_of(4, 16, torch.bfloat16), small):
        if type(other.weight) is not type(linear.weight):
            with pytest.raises(ValueError, match="weights in more than one format side by side"):
                joined_quantized([linear.weight, other.weight])
    rules = [
        torchao.Int8DynamicActivationInt8WeightConfig(),
        torchao.Float8WeightOnlyConfig(),
        int4(16),
        torchao.IntxWeightOnlyConfig(torch.int3, torchao.PerGroup(32)),
        torchao.Int8DynamicActivationIntxWeightConfig(torch.int4, torchao.PerGroup(32)),
    ]
    for rule in rules:
        other = nn.Linear(32, 8)
        torchao.quantize_(other, rule)
        assert type(other.weight) is not nn.Parameter
        assert quantized_weights(other.weight) is None


@needs_kernels
@pytest.mark.parametrize("to", get_args(QuantizationName))
@zoo.few(zoo.FUSED)
def test_greedy_output_is_what_generate_says(name: str, to: QuantizationName) -> None:
    model = quantized(name, to, engine="fused")
    assert model.quantization == to
    assert model.engine.batch_invariant
    prompt = zoo.prompt_of(5)
    expected = model.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    for mask in MASKS:
        out = model.generate(prompt, config=DecodeConfig(skip_mask=mask, gamma=3), max_new_tokens=20)
        assert out.ids == expected.tolist()
        assert out.stats.num_drafted


def test_a_checkpoint_that_torchao_has_quantised_is_decoded_as_it_is(tmp_path: Path) -> None:
    zoo.build("llama", intermediate_size=64).save_pretrained(tmp_path)
    rules = {
        "int8": torchao.Int8WeightOnlyConfig(),
        "int4": int4(),
        "int8 activations": torchao.Int8DynamicActivationInt8WeightConfig(),
        "float8": torchao.Float8WeightOnlyConfig(),
    }
    for name, rule in rules.items():
        model = LayerSkipModel.from_pretrained(
            tmp_path, device="cpu", quantization_config=TorchAoConfig(rule), engine="eager"
        )
        assert model.quantization is None, "asked of Transformers, not of us"
        assert len(model.weights_fingerprint()) == 16
        prompt = zoo.prompt_of(5)
        expected = model.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        auto = LayerSkipModel(model.model)
        out = auto.generate(prompt, config=DecodeConfig(skip_mask=MASKS[0], gamma=3), max_new_tokens=12)
        assert out.ids == expected.tolist()
        if name in ("int8", "int4") and not isinstance(KERNELS, str):
            assert auto.engine_name == "fused"
        else:
            assert auto.engine_name == "eager"
            assert ("of 4 bits" if name == "int4" else "of 8 bits") in auto.engine_reason


def test_rounded_when_loaded_as_the_config_says(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    zoo.build("llama").save_pretrained(folder)
    whole = LayerSkipModel.from_pretrained(folder, device="cpu")
    model = LayerSkipModel.from_pretrained(folder, device="cpu", quantization="int8")
    assert (whole.quantization, whole.number_format) == (None, "float32")
    assert (model.quantization, model.number_format) == ("int8", "float32, int8 weights")
    assert model.weights_fingerprint() != whole.weights_fingerprint()
    where = {"model": str(folder), "weights_fingerprint": model.weights_fingerprint(), "num_layers": zoo.NUM_LAYERS}
    tuned = Provenance(**where, device="cpu", dtype="float32", quantization=model.quantization)
    DecodeConfig(skip_mask=MASKS[0], gamma=2, provenance=tuned).save_pretrained(folder)
    found = LayerSkipModel.from_pretrained(folder, device="cpu")
    assert found.quantization == "int8", "as the config next to it says"
    prompt = zoo.prompt_of(5)
    assert found.generate(prompt, max_new_tokens=12).ids == model.generate(prompt, max_new_tokens=12).ids


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("int8", "8 bits need sublayers compiled for a CPU, or a CUDA device"),
        ("int4", "4 bits need sublayers compiled for a CPU"),
    ],
)
def test_without_kernels_its_own_modules_decode_it(
    monkeypatch: pytest.MonkeyPatch, to: QuantizationName, said: str
) -> None:
    monkeypatch.setattr("layerskip.engines.native.library.load_kernels", lambda: "none here")
    model = quantized("llama", to)
    assert model.engine_name == "eager"
    assert said in model.engine_reason


def test_on_a_gpu_lean_layers_read_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton, which torch's packages for GPUs bring")
    refusals = iter(("Triton and its compiler, got ImportError: none", None))
    monkeypatch.setattr(weight_layout, "int8_refusal", lambda _device: next(refusals))
    linear, x = linear_of(40, 24, torch.float32), torch.randn(3, 24)
    layers = TorchLayers(torch.device("cuda"), lambda _runs: [])
    with pytest.raises(ValueError, match="weights of 8 bits need Triton and its compiler, got ImportError: none"):
        layers.linear([linear.weight.detach()], None)
    found = layers.linear([linear.weight.detach()], None, torch.arange(39, -1, -1))
    torch.testing.assert_close(found(x), linear(x).flip(1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"quantization": "int3"}, "quantization: must be one of int8, int4, got 'int3'"),
        ({"device_map": "auto"}, "quantization: int8 needs a model on one device, got a device_map"),
        ({"quantization_config": TorchAoConfig(torchao.Int8WeightOnlyConfig())}, "this one's are quantised already"),
    ],
    ids=["name", "device map", "twice"],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        LayerSkipModel.from_pretrained(tmp_path, **({"device": "auto", "quantization": "int8"} | arguments))


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"needs the torchao library: pip install 'layerskip\[quantized\]'"):
        quantize(zoo.build("llama"), "int8")


def test_there_are_no_drafts_of_8_bits_nor_smaller_checkpoints_of_it(tmp_path: Path) -> None:
    model = quantized("llama")
    with pytest.raises(ValueError, match="int8 drafts need weights that are not quantised already"):
        model.check_config(DecodeConfig(skip_mask=SkipMask.none(zoo.NUM_LAYERS).rounded(8), gamma=3))
    with pytest.raises(UnsupportedModelError, match="quantised weights cannot be cut"):
        write_draft_checkpoint(model, MASKS[0], tmp_path / "draft", {})
