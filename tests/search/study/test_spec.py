"""study.toml and flags become one validated value, or one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search.study.spec import StudySpec, load_spec, to_toml

MINIMAL = 'model = "./model"\nprompts = "p.jsonl"\n'


def load(tmp_path: Path, text: str, **flags: Any) -> StudySpec:
    (tmp_path / "study.toml").write_text(text)
    return load_spec(flags, str(tmp_path), demo=tmp_path)[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trials = 0", "trials: input should be greater than or equal to 1, got '0'"),
        ("gamma_max = 65", "gamma_max: input should be less than or equal to 64, got '65'"),
        ("max_new_tokens = 1", "max_new_tokens: input should be greater than or equal to 2, got '1'"),
        ("timeout_s = -1.0", "timeout_s: input should be greater than 0, got '-1.0'"),
        ('granularity = "head"', "granularity: input should be 'layer' or 'sublayer', got 'head'"),
        ('sampler = "magic"', "sampler: input should be"),
        ('trials = "9"', "trials: input should be a valid integer, got '9'"),
        ("speed = 3", "speed: unknown field"),
        ('group_field = ""', "group_field: string should have at least 1 character"),
        ('study_name = ""', "study_name: string should have at least 1 character"),
        ("trials = ", "not valid TOML"),
    ],
)
def test_errors_in_the_file_name_it(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match="^" + str(tmp_path / "study.toml")) as caught:
        load(tmp_path, MINIMAL + line + "\n")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_in_a_flag_does_not_blame_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^trials: input should be greater than or equal to 1, got '-4'$"):
        load(tmp_path, MINIMAL, trials=-4)


def test_flags_override_the_file(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAL + "trials = 9\nseed = 3\n", trials=5, device=None)
    assert (spec.trials, spec.seed, spec.device) == (5, 3, "auto")


def test_all_drafters_are_those_without_the_line(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + 'drafters = ["suffix"]\n', drafters=("all",)).ways == load(tmp_path, MINIMAL).ways
    with pytest.raises(ValueError, match="drafters"):
        load(tmp_path, MINIMAL, drafters=("all", "suffix"))


def test_paths_are_relative_to_what_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = MINIMAL + 'storage = "sqlite:///s.db"\n'
    spec = load(tmp_path, text, held_out="h.jsonl")
    assert spec.model == str(tmp_path / "model")
    assert spec.prompts == str(tmp_path / "p.jsonl")
    assert spec.storage == f"sqlite:///{tmp_path / 's.db'}"
    assert spec.held_out == str(elsewhere / "h.jsonl")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("sqlite:///{tmp}/s/study.db", "sqlite:///./study.db"),
        ("sqlite:///{tmp}/study.db?timeout=9", "sqlite:///../study.db?timeout=9"),
        ("journal:{tmp}/s/~x/j.log", "journal:./~x/j.log"),
        ("sqlite:////elsewhere/study.db", "sqlite:////elsewhere/study.db"),
        ("postgresql://host/db", "postgresql://host/db"),
    ],
)
def test_a_storage_file_near_the_folder_is_written_relative_to_it(tmp_path: Path, given: str, written: str) -> None:
    """And so a study's folder can be moved with the folders in it."""
    folder = tmp_path / "s"
    folder.mkdir()
    spec = load(tmp_path, MINIMAL, storage=given.format(tmp=tmp_path))
    text = to_toml(spec, folder)
    assert f'storage = "{written}"\n' in text
    assert load(folder, text) == spec


def test_a_hub_id_stays_one(tmp_path: Path) -> None:
    assert load(tmp_path, 'model = "org/name"\nprompts = "p"\n').model == "org/name"
    (tmp_path / "org/name").mkdir(parents=True)
    assert load(tmp_path, 'model = "org/name"\nprompts = "p"\n').model == str(tmp_path / "org/name")


def test_no_study_and_half_a_study(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file; give --study"):
        load_spec({}, str(tmp_path), demo=tmp_path)
    with pytest.raises(ValueError, match=r"^--prompts: a new study needs"):
        load_spec({"model": "gpt2"}, None, demo=tmp_path)


def test_a_new_study_is_named_for_model_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"model": "org/Small-1B", "prompts": "p.jsonl", "device": "cuda:1"}
    _, paths = load_spec(flags, None, demo=tmp_path)
    assert paths.folder == tmp_path / "studies/Small-1B-cuda1"


def test_a_written_study_reads_back_the_same(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = load(tmp_path, MINIMAL, trials=7, study_name='odd "name" \\ x', timeout_s=3.5, trust_remote_code=True)
    (tmp_path / "study.toml").write_text(to_toml(spec, tmp_path))
    assert load_spec({}, str(tmp_path), demo=tmp_path)[0] == spec
    assert 'model = "./model"' in (tmp_path / "study.toml").read_text()
