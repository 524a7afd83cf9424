"""`search.tune`: the pipeline on a model in memory, and on fakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import search
from layerskip import DecodeConfig, LayerSkipModel
from layerskip.model import resolve_model_path
from search.measure.subject import Subject
from search.study.spec import StudyPaths, StudySpec
from search.tuner import SearchFailed, TuneOptions, _prompt_file, _search, _subject
from tests.search.helpers.fakes import (
    FINGERPRINT,
    MODEL,
    SPACE,
    Bench,
    group_prompts,
    make_spec,
    prompts,
    true_speedup,
)

TEXTS = [f"w{i} w{i + 1} w3" for i in range(8)]
FAST: dict[str, Any] = {
    "trials": 2,
    "engine": "eager",
    "max_new_tokens": 8,
    "gamma_max": 3,
    "trial_seconds": 0.1,
    "confirm_repeats": 1,
    "quiet": True,
}


def with_name(config: DecodeConfig, model: str) -> DecodeConfig:
    return config.model_copy(update={"provenance": config.provenance.model_copy(update={"model": model})})


def read_with_whole_name(file: Path, model: str) -> DecodeConfig:
    """What it holds, once its name of the model is found to lead there."""
    config = DecodeConfig.load(file)
    assert resolve_model_path(config.provenance.model, file) == model
    return with_name(config, model)


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval(), AutoTokenizer.from_pretrained(tiny_model)


def test_texts_in_a_config_out_and_nothing_left_behind(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, tokenizer = loaded
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    config = search.tune(model, tokenizer, TEXTS, **FAST)
    assert isinstance(config, DecodeConfig)
    assert config.provenance.model == model.name_or_path
    assert config.provenance.num_trials == 2
    assert config.provenance.command == "search.tune"
    assert (config.confirmed is not None) == config.speculates == (config.reason is None)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    ids = tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    assert LayerSkipModel(model, tokenizer, config, engine="eager").generate(ids, max_new_tokens=8).ids == plain


@pytest.mark.slow
def test_sampled_text_is_replayed_exactly_and_drawn_as_transformers_draws_it(
    loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = loaded
    options = FAST | {"trials": 16, "regimes": ["t1.3", "greedy"], "force": True, "study": tmp_path}
    config = search.tune(model, tokenizer, TEXTS, **options)
    assert config.regime_names == ("t1.3", "greedy")
    for folder in (tmp_path, tmp_path / "greedy"):
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["replay"]["exact_share"] == 1.0
        assert summary["not_lossless"] == []
    ids = tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]
    arguments = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.3}
    torch.manual_seed(5)
    expected = model.generate(ids, **arguments)[0, 3:].tolist()
    assert LayerSkipModel(model, tokenizer, config, engine="eager").generate(ids, seed=5, **arguments).ids == expected


@pytest.mark.slow
def test_a_kept_study_goes_on_and_is_there_for_the_other_commands(
    loaded: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deep" / "study"
    folder.parent.mkdir()
    with pytest.raises(ValueError, match="prompts:9: prompt: must hold more than white space"):
        search.tune(*loaded, [*TEXTS, " "], **FAST | {"study": folder})
    first = search.tune(*loaded, TEXTS, **FAST | {"study": folder, "quiet": False})
    assert "trial 2/2" in capsys.readouterr().out
    assert first == read_with_whole_name(folder / "best.json", loaded[0].name_or_path)
    files = {file.name for file in folder.iterdir()}
    assert {"study.toml", "study.db", "best.json", "summary.json", "tuning.jsonl"} <= files
    second = search.tune(*loaded, TEXTS, **FAST | {"study": str(folder), "trials": 3})
    assert second.provenance.num_trials == 3
    spec, paths = search.load_spec({}, str(folder), demo=Path("none"))
    assert (spec.model, spec.prompts) == (loaded[0].name_or_path, str(folder / "tuning.jsonl"))
    assert paths.study_name(spec) == second.provenance.study
    with pytest.raises(ValueError, match=r"prompts: must be those that the study began with"):
        search.tune(*loaded, TEXTS[1:], **FAST | {"study": folder})
    with pytest.raises(ValueError, match=r"max_new_tokens was 8, now 9"):
        search.tune(*loaded, TEXTS, **FAST | {"study": folder, "trials": 5, "max_new_tokens": 9})


def test_every_shape_of_a_prompt(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    chatty = AutoTokenizer.from_pretrained(loaded[0].name_or_path)
    chatty.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    mixed: list[Any] = [
        "w1 w2 w3",
        [{"role": "user", "content": "w4 w5"}],
        {"prompt": "w6 w7", "id": "six"},
        {"messages": [{"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}]},
    ]
    paths = StudyPaths(tmp_path)
    files = {
        "prompts": _prompt_file(mixed, "prompts", paths),
        "held_out": _prompt_file(TEXTS[4:], "held_out", paths),
    }
    subject = _subject(loaded[0], chatty, make_spec(**files, engine="eager", max_new_tokens=8), paths)
    texts = [chatty.decode(prompt.ids) for prompt in subject.tuning]
    assert texts == ["w1 w2 w3", "w4 w5", "w6 w7", "w8 w9"]
    assert [prompt.prompt_id for prompt in subject.tuning] == ["tuning-1", "tuning-2", "six", "tuning-4"]
    assert [chatty.decode(prompt.ids) for prompt in subject.held_out] == TEXTS[4:]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": []}, "prompts: must hold at least one prompt, got none"),
        ({"prompts": ["w1", "w2"]}, "prompts: without held_out the prompts are split, which needs at least 6, got 2"),
        ({"prompts": [*TEXTS, 7]}, r"prompts\[8\]: must be a text, a chat .* got int"),
        ({"prompts": [*TEXTS, {"prompt": object()}]}, "prompts: must hold texts, chats and records of JSON values"),
        ({"prompts": [*TEXTS, {"text": "w1"}]}, "prompts:9: must have exactly one of the fields"),
        ({"prompts": [*TEXTS, "w1 " * 80]}, "prompts:9: 80 prompt tokens"),
        ({"held_out": TEXTS[:4]}, "held_out:1: held-out prompt is also a tuning prompt"),
        ({"trials": 0}, "trials: "),
        ({"sampler": "luck"}, "sampler: "),
        ({"tokenizer": None}, "tokenizer: is required"),
        ({"model": None}, "model: must be a causal LM with weights, got NoneType"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    loaded: tuple[Any, Any], given: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"model": loaded[0], "tokenizer": loaded[1], "prompts": TEXTS} | FAST | {"quiet": False} | given
    with pytest.raises(ValueError, match=said) as caught:
        search.tune(**arguments)
    assert "\n" not in str(caught.value)
    assert "search-tune-" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_missing_files_unknown_options_and_training_mode(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such prompt file"):
        search.tune(*loaded, tmp_path / "none.jsonl", **FAST)
    with pytest.raises(TypeError, match=r"tune: unknown options device"):
        search.tune(*loaded, TEXTS, **FAST, device="cpu")
    other = AutoModelForCausalLM.from_pretrained(loaded[0].name_or_path).train()
    with pytest.raises(ValueError, match="model: must be in evaluation mode"):
        search.tune(other, loaded[1], TEXTS, **FAST)


def fake_subject(bench: Bench) -> Subject:
    return Subject(bench.decoder, SPACE, prompts(12), prompts(12, first=500), FINGERPRINT, MODEL)


def test_the_winner_of_the_pipeline_is_returned(bench: Bench) -> None:
    spec = make_spec(trials=12, sampler="tpe", storage=bench.url)
    config = _search(fake_subject(bench), spec, bench.paths, quiet=True, keeps=True, load_s=0.0)
    assert config.confirmed.speedup == pytest.approx(true_speedup(config), rel=0.03)
    assert config == with_name(DecodeConfig.load(bench.paths.best), spec.model)


def test_where_nothing_is_faster_the_config_says_so(bench: Bench) -> None:
    bench.decoder.gain = 0.0
    spec = make_spec(trials=4, sampler="tpe", storage=bench.url)
    config = _search(fake_subject(bench), spec, bench.paths, quiet=True, keeps=False, load_s=0.0)
    assert config.gamma == 0
    assert config.reason is not None
    assert not bench.paths.best.exists()


def test_a_broken_machine_and_a_wrong_output_are_raised_with_their_reason(bench: Bench) -> None:
    bench.decoder.wrong_on = lambda config: config.speculates
    spec = make_spec(trials=4, sampler="tpe", storage=bench.url)
    with pytest.raises(SearchFailed, match="NOT LOSSLESS"):
        _search(fake_subject(bench), spec, bench.paths, quiet=True, keeps=False, load_s=0.0)


@pytest.mark.parametrize("per_group", [False, True])
def test_failures_in_a_row_are_raised(bench: Bench, per_group: bool) -> None:
    bench.decoder.break_on = lambda config: RuntimeError("driver gone") if config.skip_mask.num_skipped else None
    sets = group_prompts({"a": 4, "b": 4}), group_prompts({"a": 4, "b": 4}, first=500)
    subject = Subject(bench.decoder, SPACE, *sets, FINGERPRINT, MODEL)
    spec = make_spec(trials=30, max_failures=3, repeat_every=0, sampler="tpe", per_group=per_group, storage=bench.url)
    with pytest.raises(SearchFailed, match="3 trials in a row failed, the last one with RuntimeError: driver gone"):
        _search(subject, spec, bench.paths, quiet=True, keeps=False, load_s=0.0)


def test_the_options_are_those_of_a_study_but_for_what_the_model_itself_says() -> None:
    of_the_model = {"model", "device", "device_map", "dtype", "quantization", "num_threads", "revision"}
    of_the_model |= {"trust_remote_code"}
    of_the_folder = {"storage", "study_name"}
    options = StudySpec.model_fields.keys() - of_the_model - of_the_folder - {"prompts", "trials"}
    assert TuneOptions.__annotations__.keys() == options | {"study", "quiet"}


GROUPED = [{"prompt": text, "category": "odd" if i % 2 else "even"} for i, text in enumerate(TEXTS)]


@pytest.mark.slow
def test_a_setting_per_group(loaded: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The held-out prompts are split off group by group; the config holds a setting for each."""
    study = tmp_path / "study"
    records = [{"prompt": one["prompt"], "topic": one["category"]} for one in GROUPED]
    options = FAST | {"per_group": True, "group_field": "topic", "trials": 1, "study": study}
    config = search.tune(*loaded, records, **options)
    assert config.groups is not None
    assert list(config.groups) == ["even", "odd"]
    assert config == read_with_whole_name(study / "best.json", loaded[0].name_or_path)
    assert '"per_group"' in (study / "summary.json").read_text(encoding="utf-8")
    model = LayerSkipModel(*loaded, config, engine="eager")
    ids = loaded[1]("w1 w2 w3", return_tensors="pt")["input_ids"]
    plain = loaded[0].generate(ids, max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    for group in config.groups:
        assert model.generate(ids, max_new_tokens=8, group=group).ids == plain
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([*GROUPED, {"prompt": "w30 w31"}], "prompts:9: category: .*got no such field"),
        ([{"prompt": text, "category": "all"} for text in TEXTS], r"needs 2 to 64 groups of prompts, got 1 \(all\)"),
        ([*GROUPED, {"prompt": "w30 w31", "category": "rare"}], "group 'rare' needs at least 2 tuning and 2 held-out"),
    ],
)
def test_bad_groups_are_told_in_the_callers_words(loaded: tuple[Any, Any], records: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        search.tune(*loaded, records, **FAST | {"per_group": True})
    assert "--" not in str(caught.value)
    assert "\n" not in str(caught.value)
