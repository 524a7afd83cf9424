"""Models spread over devices, main memory and disk: same tokens, same fingerprint; what cannot be served is refused."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import distributed

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, doctor, generate
from layerskip.analysis.step_times import StepTimer
from layerskip.analysis.teacher_forcing import ForcedText, make_teacher_forcing
from layerskip.huggingface.device_map import check_device_map, describe_device_map, parse_device_map, refuse_torchrun
from layerskip.huggingface.loading import weights_fingerprint
from layerskip.huggingface.placement import Placement, UnsupportedModelError
from layerskip.interop.draft_checkpoint import write_draft_checkpoint
from tests.layerskip import zoo

ALL_ON_DISK: dict[str, int | str] = {"": "disk"}
MASK = SkipMask.from_sublayers(zoo.NUM_LAYERS, attention=[1, 2], mlp=[2, 3])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed") / "model"
    zoo.build("llama").save_pretrained(folder)
    return folder


def load(saved: Path, device_map: Any, **arguments: Any) -> LayerSkipModel:
    return LayerSkipModel.from_pretrained(saved, device_map=device_map, **arguments)


@pytest.mark.parametrize("device_map", [zoo.SPREAD, ALL_ON_DISK], ids=["mixed", "all on disk"])
@pytest.mark.slow
def test_greedy_output_of_an_offloaded_model_is_generates_own(saved: Path, device_map: Any) -> None:
    model = load(saved, device_map)
    assert (model.engine_name, model.device) == ("eager", torch.device("cpu"))
    assert model.placement.is_offloaded
    draw = random.Random(0)
    accepted = drafted = 0
    for case in range(10):
        prompt, budget = zoo.prompt_of(draw.choice([1, 5, 9]), case), draw.choice([1, 7, 20])
        config = DecodeConfig(
            skip_mask=zoo.random_mask(zoo.NUM_LAYERS, draw),
            gamma=draw.choice([0, 1, 4]),
            draft_threshold=draw.choice([0.0, 0.4]),
            target_threshold=draw.choice([0.0, 0.3]),
        )
        out = model.generate(prompt, config=config, max_new_tokens=budget)
        assert tuple(out.ids) == zoo.greedy_reference("llama", prompt)[:budget], config
        accepted, drafted = accepted + out.stats.num_accepted, drafted + out.stats.num_drafted
    assert 0 < accepted < drafted
    # Nothing stays behind: what was loaded for a forward is gone again, and the gates are off.
    assert Placement.of(model.model) == model.placement
    ids = torch.tensor([zoo.prompt_of(5)])
    theirs = model.model.generate(ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    assert tuple(theirs[0, 5:].tolist()) == zoo.greedy_reference("llama", zoo.prompt_of(5))[:8]


@pytest.mark.slow
@zoo.each(("gemma3", "bloom", "opt", "gpt2", "mixtral", "gemma4", "qwen3_5", "lfm2", "granite-hybrid"))
def test_other_architectures_kept_on_disk(name: str, tmp_path: Path) -> None:
    """Models that add residuals inside, keep positions in buffers, or answer with tuples."""
    model = zoo.build(name)
    disk_offload(model, tmp_path)
    wrapped = LayerSkipModel(model)
    assert wrapped.engine_name == "eager"
    assert wrapped.whole_layers_only == zoo.layerskip_of(name).whole_layers_only
    assert wrapped.weights_fingerprint() == weights_fingerprint(zoo.model_of(name))
    assert not wrapped.can_narrow
    assert wrapped.bits_refusal(8) is not None
    for kind, mask in zoo.masks_of(name).items():
        config = DecodeConfig(skip_mask=mask.narrowed(None).rounded(None), gamma=3)
        out = wrapped.generate(zoo.prompt_of(5), config=config, max_new_tokens=10)
        assert tuple(out.ids) == zoo.greedy_reference(name, zoo.prompt_of(5))[:10], kind


def test_hooks_on_one_device_leave_the_lean_layers_usable() -> None:
    model = zoo.build("llama")
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert Placement.of(model).is_whole
    for engine in ("fused", "eager"):
        out = LayerSkipModel(model, engine=engine).generate(
            zoo.prompt_of(5), config=DecodeConfig(skip_mask=MASK, gamma=3), max_new_tokens=12
        )
        assert tuple(out.ids) == zoo.greedy_reference("llama", zoo.prompt_of(5))[:12]


@pytest.mark.slow
def test_sampling_of_an_offloaded_model_draws_the_same_tokens(saved: Path) -> None:
    plain = LayerSkipModel.from_pretrained(saved, device="cpu", engine="eager")
    spread = load(saved, zoo.SPREAD)
    config = DecodeConfig(skip_mask=MASK, gamma=3)
    for seed in range(4):
        arguments: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": seed, "config": config}
        ours = spread.generate(zoo.prompt_of(4), max_new_tokens=16, **arguments)
        assert ours.ids == plain.generate(zoo.prompt_of(4), max_new_tokens=16, **arguments).ids


def test_what_the_search_needs_works_offloaded(saved: Path) -> None:
    """Teacher forcing with the target's keys, decoding and step times."""
    plain, spread = LayerSkipModel.from_pretrained(saved, device="cpu", engine="eager"), load(saved, zoo.SPREAD)
    prompt = zoo.prompt_of(5)
    texts = [ForcedText(prompt, zoo.greedy_reference("llama", prompt)[:12])]
    ours, theirs = (make_teacher_forcing(model, texts) for model in (spread, plain))
    assert ours.keys == theirs.keys == "target"
    for got, expected in zip(ours.read(MASK, 2).choices, theirs.read(MASK, 2).choices, strict=True):
        assert (got == expected).all()
    configs = [DecodeConfig.plain(zoo.NUM_LAYERS), DecodeConfig(skip_mask=MASK, gamma=3)]
    for config in configs:
        ids = spread.generate(prompt, config=config, max_new_tokens=12).ids
        assert tuple(ids) == zoo.greedy_reference("llama", prompt)[:12]
    timer = StepTimer(spread, 3)
    assert all(seconds > 0 for seconds in timer.verify_s(prompt, [1, 4]))
    assert all(seconds > 0 for seconds in timer.draft_s(prompt, [MASK], gamma=2, threshold=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fingerprint_does_not_depend_on_where_weights_are(tied: bool, dtype: str, tmp_path: Path) -> None:
    model = zoo.build("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    expected = weights_fingerprint(model)
    for device_map in (zoo.SPREAD | {"lm_head": "cpu"}, {"": "disk"}, "auto"):
        assert load(tmp_path / "model", device_map, dtype=dtype).weights_fingerprint() == expected
    cpu_offload(model)  # the weights in main memory, known to the hooks alone
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert weights_fingerprint(model) == expected
    with torch.no_grad():
        other = zoo.build("llama", tie_word_embeddings=tied, seed=7)
    assert weights_fingerprint(cpu_offload(other)) != expected


def test_an_exception_in_an_offloaded_layer_leaves_the_model_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved, zoo.SPREAD)
    config = DecodeConfig(skip_mask=MASK, gamma=3)
    mlp: Any = model.adapter.layers[3].mlp
    calls = iter(range(100))

    def fail_later(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 4:
            raise RuntimeError("out of memory")
        return activation(x)

    activation = mlp.act_fn.forward
    monkeypatch.setattr(mlp.act_fn, "forward", fail_later)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(zoo.prompt_of(5), config=config, max_new_tokens=12)
    monkeypatch.undo()
    out = model.generate(zoo.prompt_of(5), config=config, max_new_tokens=12)
    assert tuple(out.ids) == zoo.greedy_reference("llama", zoo.prompt_of(5))[:12]


# What is said and refused.


def test_engines_that_need_the_whole_model_say_why_and_auto_takes_eager(saved: Path) -> None:
    choice = load(saved, zoo.SPREAD).engine_reason
    assert choice == (
        "the only one for a model that is not whole on one device: cpu (weights partly kept elsewhere and loaded for "
        "each forward)"
    )
    for engine in ("fused", "cuda_graph"):
        with pytest.raises(UnsupportedModelError, match=f"engine {engine}: needs a model that is whole on one device"):
            load(saved, zoo.SPREAD, engine=engine)
    assert load(saved, "auto", engine="fused").engine_name == "fused"  # here everything fits the one device


def test_offloading_is_warned_of(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "layerskip"):
        load(saved, "auto")
        assert "copied for every forward" not in caplog.text
        load(saved, ALL_ON_DISK)
    assert f"{saved}: 100 % of its weights (0 MiB) are kept in main memory or on disk" in caplog.text


def test_an_offloaded_model_is_not_cut(saved: Path, tmp_path: Path) -> None:
    mask = SkipMask.from_layers(zoo.NUM_LAYERS, [2])
    with pytest.raises(UnsupportedModelError, match="model: must be whole on one device to be cut, this one is on cpu"):
        write_draft_checkpoint(load(saved, zoo.SPREAD), mask, tmp_path / "draft", {})
    assert not (tmp_path / "draft").exists()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device_map": "auto", "device": "cpu"}, "device: must be 'auto' beside a device_map"),
    ({"device_map": "cpu"}, "device_map: must be auto, balanced, balanced_low_0, sequential, or module names"),
    ({"device_map": {"a(": "cpu"}}, "device_map: keys must be names of modules such as 'model.layers.0', got 'a('"),
    ({"device_map": {"": True}}, "device_map.: must be a device's number, 'cuda:N', 'cpu' or 'disk', got 'True'"),
    ({"device_map": {"": "a b"}}, "device_map.: must be a device's number, 'cuda:N', 'cpu' or 'disk', got 'a b'"),
    ({"device_map": {"model": "cpu", "lm_head": "abacus"}}, "device_map.lm_head: device: must be 'auto', 'cpu'"),
    ({"device_map": {"": "cpu", "model.layer.1": "disk"}}, "device_map: keys must be modules of "),
    ({"device_map": {"model.layers.0": "cpu", "lm_head": "disk"}}, "model: cannot load "),
    ({"tp_plan": "auto"}, "tp_plan: tensor parallel models cannot be decoded under a mask; device_map='auto'"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=str)
def test_what_cannot_be_placed_is_said_in_one_line(arguments: dict[str, Any], said: str, saved: Path) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 -- matched below
        LayerSkipModel.from_pretrained(saved, **arguments)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_devices_that_are_not_there(saved: Path) -> None:
    for place in (0, "cuda:1"):
        with pytest.raises(
            ValueError, match=r"device_map\.model: device: CUDA device asked for, and this machine has 0"
        ):
            load(saved, {"model": place, "lm_head": "cpu"})


def test_without_accelerate_the_extra_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"device_map: needs the accelerate library: pip install 'layerskip\[large\]'"):
        load(saved, "auto")


def test_weights_that_nothing_brings_together_are_refused() -> None:
    model = zoo.build("llama")
    model.model.layers[2].to("meta")
    with pytest.raises(UnsupportedModelError, match="has weights on the meta device, and nothing that loads them"):
        LayerSkipModel(model)


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_tensor_parallel_models_are_refused() -> None:
    """A real one, over a mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = zoo.build("llama")
    parallelize_module(model.model.layers[1].mlp, init_device_mesh("cpu", (1,)), {"up_proj": ColwiseParallel()})
    with pytest.raises(UnsupportedModelError, match=r"distributed \(DTensor\).*device_map='auto'"):
        LayerSkipModel(model)
    model = zoo.build("llama")
    model._tp_size = 2  # what Transformers notes down of one that it has cut itself
    with pytest.raises(UnsupportedModelError, match="its weights are tensor parallel"):
        LayerSkipModel(model)


def test_device_maps_of_the_command_line() -> None:
    assert parse_device_map(None) is None
    assert parse_device_map("sequential") == "sequential"
    assert parse_device_map('{"model": 0, "lm_head": "cpu"}') == {"model": 0, "lm_head": "cpu"}
    for text in ("", "{", '{"model": [1]}', "{}", '{"model": null}', "cuda:0", "[1]"):
        with pytest.raises(ValueError, match=r"^device_map") as error:
            parse_device_map(text)
        assert "\n" not in str(error.value)
    assert check_device_map({"": torch.device("cuda:1")}) == {"": "cuda:1"}


def test_a_map_in_one_line() -> None:
    assert describe_device_map({"": "disk"}) == "all: disk"
    layers = {f"model.layers.{i}": int(i > 9) for i in range(12)}
    text = describe_device_map({"model.embed_tokens": 0, **layers, "model.norm": 1, "lm_head": "cpu"})
    assert text == "model.embed_tokens, model.layers.0-9: 0; model.layers.10-11, model.norm: 1; lm_head: cpu"


@pytest.mark.parametrize("command", [generate, doctor], ids=["generate", "doctor"])
def test_torchrun_is_refused(command: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_torchrun("")
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = ["--model", str(saved), "--prompt", "x"] if command is generate else [str(saved)]
    error = refused(command.main, arguments)
    assert "WORLD_SIZE: must be 1, this command is no part of a torchrun job, got 4; for a model that is" in error


@pytest.mark.slow
def test_the_doctor_takes_a_device_map(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(saved), "--device-map", json.dumps(zoo.SPREAD), "--tokens", "6", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["works"]
    assert record["device"].startswith("cpu (weights partly kept elsewhere")
    assert doctor.main([str(saved), "--device-map", "auto", "--device", "cpu"]) == 2
    assert "device: must be 'auto' beside a device_map" in capsys.readouterr().err
