"""LayerSkipModel from the outside: text and ids, streaming, loading, and one clear error for each mistake."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import layerskip.model
from layerskip import Confirmed, DecodeConfig, LayerSkipModel, Provenance, RegimeSetting, Sampling, SkipMask
from layerskip.decoding.text_stream import TextStream
from layerskip.drafters import TextStore
from layerskip.engines.native import library
from tests.layerskip import tokenizers, zoo
from tests.layerskip.tape import graph_model

CONFIG = DecodeConfig(skip_mask=SkipMask.from_layers(4, [3]), gamma=4)
TEXT = "naïve – “quotes” 日本語 🙂\n\tdef f(x):  return x"


# Prompts.


def test_text_ids_and_tensors_are_the_same_prompt(text_model: LayerSkipModel, tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    expected = text_model.generate(TEXT, max_new_tokens=9, config=CONFIG)
    assert text_model.encode(TEXT) == ids
    tensor = torch.tensor(ids)
    for prompt in (ids, tuple(ids), tensor, tensor.unsqueeze(0), tensor.int(), tensor.numpy()):
        assert text_model.generate(prompt, max_new_tokens=9, config=CONFIG).ids == expected.ids
    hf = text_model.model.generate(tensor.unsqueeze(0), max_new_tokens=9, do_sample=False)[0, len(ids) :].tolist()
    assert expected.ids == hf
    assert expected.text == tokenizer.decode(hf)
    assert expected.stats.num_prompt_tokens == len(ids)


def test_the_models_own_config_is_the_default_and_an_argument_overrides_it() -> None:
    model = LayerSkipModel(zoo.model_of("llama"), engine="eager")
    assert model.config == DecodeConfig.plain(4)
    assert model.generate([1], max_new_tokens=9).stats.num_rounds == 0
    model.config = CONFIG
    assert model.generate([1], max_new_tokens=9).stats.num_rounds > 0
    assert model.generate([1], max_new_tokens=9, config=DecodeConfig.plain(4)).stats.num_rounds == 0
    assert model.config == CONFIG


REGIMES = (
    RegimeSetting(skip_mask=SkipMask.none(4), gamma=3, sampling=Sampling.parse("t0.7_k0")),
    RegimeSetting(skip_mask=SkipMask.none(4), gamma=0, reason="slower", sampling=Sampling.parse("t1.2")),
)
IN_REGIMES = DecodeConfig(skip_mask=SkipMask.none(4), gamma=1, sampling=Sampling(), regimes=REGIMES)
"""A draft of the whole model is always accepted when greedy, so that its length tells which setting was followed."""


@pytest.mark.parametrize(
    ("arguments", "regime", "gamma"),
    [
        ({}, "greedy", 1),  # what the model's own generation config says
        ({"do_sample": False, "temperature": 1.2}, "greedy", 1),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0}, "t0.7_k0", 3),
        ({"do_sample": True, "temperature": 0.6}, "t0.7_k0", 3),
        ({"do_sample": True, "temperature": 1.1}, "t1.2", 0),
    ],
)
def test_a_request_is_decoded_with_the_setting_of_its_regime(
    arguments: dict[str, Any], regime: str, gamma: int
) -> None:
    model = LayerSkipModel(zoo.model_of("llama"), config=IN_REGIMES, engine="eager")
    arguments = arguments | {"max_new_tokens": 9, "eos_token_id": [], "seed": 5}
    stream = model.stream([1, 2, 3], **arguments)
    assert stream.config == IN_REGIMES.for_sampling(Sampling.parse(regime).params())
    for _ in stream:
        pass
    alone = DecodeConfig(skip_mask=SkipMask.none(4), gamma=gamma)
    expected = model.generate([1, 2, 3], config=alone, **arguments)
    for output in (
        stream.output(),
        model.generate([1, 2, 3], **arguments),
        LayerSkipModel(zoo.model_of("llama"), engine="eager").generate([1, 2, 3], config=IN_REGIMES, **arguments),
    ):
        assert output.ids == expected.ids
        assert output.stats.counters() == expected.stats.counters()
        assert len(output.stats.drafted_by_position) == gamma


def test_a_config_that_does_not_know_its_sampling_is_used_for_every_request() -> None:
    model = LayerSkipModel(zoo.model_of("llama"), config=CONFIG, engine="eager")
    for arguments in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}):
        assert model.stream([1, 2, 3], max_new_tokens=4, **arguments).config is CONFIG
    known = CONFIG.model_copy(update={"sampling": Sampling()})
    assert model.stream([1], max_new_tokens=4, do_sample=True, config=known).config is known


def test_properties() -> None:
    model = zoo.layerskip_of("gemma3")
    assert (model.num_layers, model.max_positions, model.dtype) == (4, zoo.MAX_POSITIONS, torch.float32)
    assert (model.device, model.engine_name, model.model_class) == (torch.device("cpu"), "eager", "Gemma3ForCausalLM")
    assert model.eos_token_ids == frozenset()
    assert zoo.layerskip_of("gpt2").max_positions == zoo.layerskip_of("mpt").max_positions == zoo.MAX_POSITIONS


def test_target_logits_are_the_full_models() -> None:
    ids = list(zoo.prompt_of(9))
    with torch.inference_mode():
        expected = zoo.model_of("gemma3")(torch.tensor([ids]), use_cache=False).logits[0, -4:]
    torch.testing.assert_close(zoo.layerskip_of("gemma3").target_logits(ids, num_logits=4), expected)


# Arguments.

BAD_ARGUMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no tokens": ([1], {"max_new_tokens": 0}, "max_new_tokens: must be a whole number of at least 1, got 0"),
    "a flag": ([1], {"max_new_tokens": True}, "max_new_tokens: must be .*got True"),
    "empty ids": ([], {}, "prompt: must hold at least one token, got none"),
    "id beyond": ([1, zoo.VOCAB], {}, rf"prompt: token ids must be in 0..{zoo.VOCAB - 1}, got {zoo.VOCAB}"),
    "id below": ([-1], {}, r"prompt: token ids must be in 0..60, got -1"),
    "a batch": (torch.ones(2, 3).long(), {}, r"prompt: must be text or one row of token ids, got shape \(2, 3\)"),
    "floats": ([1.0, 2.0], {}, "prompt: token ids must be int64 or int32, got torch.float32"),
    "no prompt": (None, {}, "prompt: must be text or token ids, got NoneType"),
    "a temperature as text": ([1], {"do_sample": True, "temperature": "0.7"}, "temperature: must be .*, got '0.7'"),
    "a tiny temperature": ([1], {"do_sample": True, "temperature": 1e-30}, "temperature: must be at least 0.001"),
    "half a seed": ([1], {"do_sample": True, "seed": 1.5}, "seed: must be a whole number, got 1.5"),
    "end of text as text": (
        [1],
        {"max_new_tokens": 3, "eos_token_id": "</s>"},
        "eos_token_id: must be a token id or several, got '</s>'",
    ),
    "a file": ([1], {"config": "best.json"}, "config: must be a DecodeConfig .*, got 'best.json'"),
    "text, no tokenizer": ("hello", {}, "prompt: this model has no tokenizer, give token ids instead of text"),
    "too long": ([1] * 90, {"max_new_tokens": 7}, "must fit the model's 96 positions, got 90 \\+ 7"),
    "seed twice": ([1], {"seed": 1, "generator": torch.Generator()}, "seed: give either a seed or a generator"),
    "stop, no tokenizer": ([1], {"max_new_tokens": 3, "stop_strings": "x"}, "stop_strings: this model has no"),
    "mask": ([1], {"config": DecodeConfig.plain(3)}, "skip_mask: must have the model's 4 layers, got 3"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_in_one_line(case: str) -> None:
    prompt, arguments, message = BAD_ARGUMENTS[case]
    model = zoo.layerskip_of("llama")
    for call in (model.generate, model.stream):
        with pytest.raises(ValueError, match=message) as error:
            call(prompt, **arguments)
        assert "\n" not in str(error.value)
    assert model.generate([1], max_new_tokens=3).ids == list(zoo.greedy_reference("llama", (1,))[:3])


def test_end_of_text_ids_may_be_tensors_and_the_models_own_defaults_hold() -> None:
    model = LayerSkipModel(zoo.build("llama"))
    whole = model.generate(zoo.prompt_of(7), max_new_tokens=12).ids
    end, until_then = whole[4], whole[: whole.index(whole[4]) + 1]
    for ids in (end, [end], torch.tensor([end]), [torch.tensor(end)], np.int64(end)):
        assert model.generate(zoo.prompt_of(7), max_new_tokens=12, eos_token_id=ids).ids == until_then
    settings = model.model.generation_config
    settings.max_new_tokens, settings.suppress_tokens, settings.min_new_tokens, settings.guidance_scale = 5, [], 0, 1.0
    assert model.generate(zoo.prompt_of(7), do_sample=False, temperature=0.0).ids == whole[:5]
    settings.force_words_ids = [[1]]
    with pytest.raises(ValueError, match="force_words_ids: not supported by this decoder"):
        model.generate(zoo.prompt_of(7))


def test_what_others_draw_from_the_generator_meanwhile_is_not_drawn_again() -> None:
    model, inside = zoo.layerskip_of("llama"), []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = DecodeConfig(skip_mask=SkipMask.early_exit(4, 2), gamma=8)
        for i, _ in enumerate(
            model.stream(zoo.prompt_of(7), max_new_tokens=60, do_sample=True, top_k=0, config=config)
        ):
            inside += torch.rand(3).tolist()
            if i == 6:
                break
        assert not set(inside) & set(torch.rand(3000).tolist())


def test_what_others_draw_between_two_drafts_is_not_drawn_again() -> None:
    """The text ends where several places have noise that was not needed, with others' draws in between."""
    model, config = zoo.layerskip_of("llama"), DecodeConfig(skip_mask=SkipMask.early_exit(4, 2), gamma=8)
    inside = list[float]()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        stream = model.stream(
            zoo.prompt_of(7), max_new_tokens=20, do_sample=True, top_k=0, config=config, eos_token_id=[*range(6)]
        )
        for _ in range(4):
            next(stream)
            inside += torch.rand(3).tolist()
        for _ in stream:
            pass
        assert stream.output().finish_reason == "eos"
        assert not set(inside) & set(torch.rand(3000).tolist())


def test_stop_strings_are_made_ready_once(text_model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = list[Any](), layerskip.model.StopStringCriteria

    def make(*arguments: Any) -> Any:
        made.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(layerskip.model, "StopStringCriteria", make)
    text_model._stop_criteria.clear()
    for _ in range(3):
        text_model.generate("def", max_new_tokens=3, stop_strings=["return"])
    text_model.generate("def", max_new_tokens=3, stop_strings="class")
    assert len(made) == 2


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        zoo.layerskip_of("llama").generate([1], max_tokens=3)


def test_an_empty_text_is_refused(text_model: LayerSkipModel) -> None:
    with pytest.raises(ValueError, match="prompt: must hold at least one token"):
        text_model.generate("")


def test_the_last_position_can_be_used() -> None:
    prompt = zoo.prompt_of(90)
    # Learned positions fail one past the end, also for drafted tokens.
    models = [(name, zoo.layerskip_of(name)) for name in ("llama", "gpt2", "opt")]
    for name, model in [*models, ("gpt2", graph_model("gpt2"))]:
        out = model.generate(prompt, max_new_tokens=6, config=CONFIG)
        assert out.ids == list(zoo.greedy_reference(name, prompt, 6))


# Streaming.


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_pieces_make_up_the_text(gamma: int, text_model: LayerSkipModel, tokenizer: Any) -> None:
    config = DecodeConfig(skip_mask=CONFIG.skip_mask, gamma=gamma)
    for prompt in ("def", "日本", "🙂 x"):
        whole = text_model.generate(prompt, max_new_tokens=60, config=config)
        stream = text_model.stream(prompt, max_new_tokens=60, config=config)
        pieces = list(stream)
        assert [token for piece in pieces for token in piece.ids] == whole.ids == stream.output().ids
        assert [origin for piece in pieces for origin in piece.origins] == whole.origins
        assert "".join(piece.text for piece in pieces) == whole.text
        assert whole.text == tokenizer.decode(whole.ids, skip_special_tokens=True)
        assert len({piece.text for piece in pieces}) > 5
        assert stream.stats.num_emitted == 60


def test_output_of_a_stream_left_early_is_what_came_so_far(text_model: LayerSkipModel) -> None:
    stream = text_model.stream("def", max_new_tokens=60, config=CONFIG)
    first = next(stream)
    second = next(stream)
    stream.close()
    out = stream.output()
    assert out.ids == [*first.ids, *second.ids]
    assert out.text.startswith(first.text + second.text)
    assert out.stats.num_emitted == len(out.ids)
    assert out.finish_reason is None
    with pytest.raises(StopIteration):
        next(stream)


def push_all(tokenizer: Any, ids: list[int], cuts: set[int]) -> list[str]:
    stream, pieces, start = TextStream(tokenizer), [], 0
    for stop in sorted({*cuts, len(ids)}):
        pieces.append(stream.push(ids[start:stop]))
        start = stop
    return [*pieces, stream.finish()]


@given(text=st.text(max_size=25), cuts=st.sets(st.integers(0, 60)))
def test_any_text_in_any_portions(text: str, cuts: set[int], tokenizer: Any) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = push_all(tokenizer, ids, {cut for cut in cuts if cut < len(ids)})
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces[:-1])


@given(ids=st.lists(st.integers(0, 319), max_size=30), cuts=st.sets(st.integers(0, 30)))
def test_any_tokens_in_any_portions(ids: list[int], cuts: set[int], tokenizer: Any) -> None:
    # Random bytes: mostly no UTF-8 at all.
    ids = [token % len(tokenizer) for token in ids]
    pieces = push_all(tokenizer, ids, {cut for cut in cuts if cut < len(ids)})
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_split_over_tokens_comes_once_and_whole(tokenizer: Any) -> None:
    ids = tokenizer("a🦊b")["input_ids"]
    assert len(ids) == 6  # the fox's four bytes are four tokens
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "🦊", "b"]
    assert stream.finish() == ""


def test_text_keeps_its_blanks_whatever_its_tokenizer_drops_at_a_beginning() -> None:
    tokenizer = tokenizers.tokenizer_of("byte_fallback")
    opens, the = (tokenizer(word)["input_ids"][1:] for word in ("opens", "the"))
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in (*opens, tokenizer.unk_token_id, *the)]
    assert "".join(pieces) == "opens the" == tokenizer.decode([*opens, *the])
    assert "".join(TextStream(tokenizer, opens).push(the)) == " the"

    model, prompt = tokenizers.target_of("byte_fallback"), "The reader opens"
    out = model.generate(prompt, max_new_tokens=6)
    assert prompt + out.text == tokenizer.decode([*model.encode(prompt), *out.ids], skip_special_tokens=True)
    assert out.text == "".join(piece.text for piece in model.stream(prompt, max_new_tokens=6))
    by_ids = model.generate(model.encode(prompt), max_new_tokens=6)
    assert by_ids.text == tokenizer.decode(out.ids, skip_special_tokens=True) == out.text.removeprefix(" ")


def test_special_tokens_are_not_text(text_model: LayerSkipModel, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    stream = TextStream(tokenizer)
    assert stream.push([*tokenizer("a")["input_ids"], end]) == "a"
    assert stream.finish() == ""


# Loading.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    zoo.build("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_saved_model_loads(saved: Path, text_model: LayerSkipModel) -> None:
    model = LayerSkipModel.from_pretrained(saved, config=CONFIG, device="cpu", engine="eager")
    assert model.config == CONFIG
    assert model.dtype == torch.float32
    assert not model.model.training
    assert model.weights_fingerprint() == text_model.weights_fingerprint()
    expected = text_model.generate(TEXT, max_new_tokens=12, config=CONFIG)
    out = model.generate(TEXT, max_new_tokens=12)
    assert (out.ids, out.text) == (expected.ids, expected.text)
    for half in ({"device": "cpu", "dtype": "bfloat16"}, {"device": torch.device("cpu"), "dtype": torch.bfloat16}):
        loaded = LayerSkipModel.from_pretrained(saved, **half)
        assert loaded.dtype == torch.bfloat16
        assert loaded.weights_fingerprint() == model.weights_fingerprint()


@pytest.mark.parametrize("published", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_keeps_bfloat16_on_a_cpu_where_kernels_decode_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: torch.dtype
) -> None:
    zoo.build("llama").to(published).save_pretrained(tmp_path)

    def loaded(engine: str) -> torch.dtype:
        return LayerSkipModel.from_pretrained(tmp_path, device="cpu", engine=engine).dtype

    is_kept = published == torch.bfloat16 and not isinstance(library.load_kernels(), str)
    assert loaded("fused") == (torch.bfloat16 if is_kept else torch.float32)
    assert loaded("eager") == torch.float32
    monkeypatch.setattr(library, "load_kernels", lambda: "no C++ compiler")
    assert loaded("fused") == torch.float32


def test_auto_is_float32_on_a_cpu_where_kernels_do_not_serve_the_architecture(tmp_path: Path) -> None:
    zoo.build("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    assert LayerSkipModel.from_pretrained(tmp_path, device="cpu").dtype == torch.float32
    assert LayerSkipModel.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_an_exported_config_finds_its_model(saved: Path) -> None:
    model = LayerSkipModel.from_pretrained(saved, device="cpu", engine="eager")
    provenance = Provenance(
        model="./model",
        weights_fingerprint=model.weights_fingerprint(),
        device="cpu",
        dtype="float32",
        num_layers=4,
    )
    config = DecodeConfig(skip_mask=CONFIG.skip_mask, gamma=2, provenance=provenance)
    config.save(saved.parent / "best.json")
    loaded = LayerSkipModel.from_config(saved.parent / "best.json", device="cpu", engine="eager")
    assert loaded.config == config
    rounded = provenance.model_copy(update={"dtype": "bfloat16"})
    config.model_copy(update={"provenance": rounded}).save(saved.parent / "best.json")
    for asked, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        loaded = LayerSkipModel.from_config(saved.parent / "best.json", device="cpu", dtype=asked, engine="eager")
        assert loaded.dtype == expected
    CONFIG.save(saved.parent / "unknown.json")
    with pytest.raises(ValueError, match=r"unknown.json: provenance: is required to know the model"):
        LayerSkipModel.from_config(saved.parent / "unknown.json")


def test_without_a_tokenizer_ids_still_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zoo.build("llama").save_pretrained(tmp_path / "bare")
    with caplog.at_level(logging.WARNING, "layerskip"):
        model = LayerSkipModel.from_pretrained(tmp_path / "bare", device="cpu", engine="eager")
    assert model.tokenizer is None
    assert "no tokenizer for" in caplog.text
    out = model.generate([1, 2], max_new_tokens=5, config=CONFIG)
    assert (out.ids, out.text) == (list(zoo.greedy_reference("llama", (1, 2))[:5]), "")


def refused(*arguments: Any, **named: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 -- the callers match
        LayerSkipModel.from_pretrained(*arguments, **named)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value)


def test_what_cannot_be_loaded_is_said_in_one_line(saved: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").startswith("model: no such folder: ")
    assert refused("./nowhere") == "model: no such folder: ./nowhere"
    assert refused("no-such-organisation/no-such-model").startswith("model: cannot load no-such-organisation/")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").endswith("is a folder without a config.json")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text((saved / "config.json").read_text())
    assert refused(tmp_path / "weightless").startswith("model: cannot load ")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert refused(tmp_path / "broken").startswith("model: cannot load ")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    assert refused(tmp_path / "strange").startswith("model: cannot load ")
    for text in ("[]", '{"model_type": ["llama"]}', '{"model_type": "llama", "auto_map": null}'):
        (tmp_path / "strange" / "config.json").write_text(text)
        assert refused(tmp_path / "strange").startswith("model: cannot load ")
    for dtype in ("int3", torch.int8):
        assert refused(saved, dtype=dtype).startswith("dtype: must be 'auto' or one of float32, bfloat16, float16, got")
    assert refused(saved, device="gpu").startswith("device: must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'")


def test_a_checkpoint_that_lacks_weights_is_not_filled_up_at_random(saved: Path, tmp_path: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    name = next(one for one in weights if one.endswith("up_proj.weight"))
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    assert refused(tmp_path) == f"model: {tmp_path} lacks weights: {name}"


def test_truncated_weights_are_said_in_one_line(saved: Path, tmp_path: Path) -> None:
    # safetensors has an exception of its own, which went past the list of those that loading turns into one line.
    (tmp_path / "cut").mkdir()
    for file in saved.iterdir():
        (tmp_path / "cut" / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000])
    assert refused(tmp_path / "cut").startswith("model: cannot load ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_where_there_is_none(saved: Path) -> None:
    assert refused(saved, device="cuda") == "device: CUDA device asked for, and this machine has 0 of them, got 'cuda'"
    assert LayerSkipModel.from_pretrained(saved, device="auto").device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_greedy_on_a_gpu() -> None:
    for name in zoo.NAMES:
        model = LayerSkipModel(zoo.build(name).to("cuda"))
        for kind, mask in zoo.masks_of(name).items():
            prompt = zoo.prompt_of(5)
            plain = model.generate(prompt, max_new_tokens=20, config=DecodeConfig.plain(4)).ids
            out = model.generate(prompt, max_new_tokens=20, config=DecodeConfig(skip_mask=mask, gamma=4)).ids
            assert out == plain, f"{name}, {kind}"


def test_public_names() -> None:
    import layerskip

    assert all(getattr(layerskip, name) for name in layerskip.__all__)
    assert layerskip.Confirmed is Confirmed
    assert layerskip.TextStore is TextStore
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = layerskip.nothing


def test_from_config_uses_the_tuned_engine_and_warns_of_other_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "model")
    wrapped = LayerSkipModel(model)
    provenance = Provenance(
        model="./model",
        weights_fingerprint=wrapped.weights_fingerprint(),
        device="cpu",
        dtype="float32",
        num_layers=zoo.NUM_LAYERS,
        engine="eager",
        num_threads=torch.get_num_threads() + 1,
    )
    config = DecodeConfig(skip_mask=SkipMask.early_exit(zoo.NUM_LAYERS, 2), gamma=2, provenance=provenance)
    config.save(tmp_path / "best.json")
    loaded = LayerSkipModel.from_config(tmp_path / "best.json", device="cpu")
    assert loaded.engine_name == "eager"
    assert f"was tuned with {torch.get_num_threads() + 1} CPU threads" in caplog.text
    caplog.clear()
    same = provenance.model_copy(update={"num_threads": torch.get_num_threads()})
    config.model_copy(update={"provenance": same}).save(tmp_path / "best.json")
    LayerSkipModel.from_config(tmp_path / "best.json", device="cpu")
    assert "CPU threads" not in caplog.text
