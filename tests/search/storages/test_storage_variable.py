"""LAYERSKIP_STORAGE: a storage whose password need not stand on a command line, nor in a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search import dashboard, export, report, run
from search.storages.address import FROM_ENVIRONMENT, STORAGE_VARIABLE, storage_argument
from search.study.spec import load_spec
from tests.search.test_commands import changed, run_main

URL = "postgresql+psycopg://me:s3cret@127.0.0.1:1/db"


def test_the_flag_wins_and_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORAGE_VARIABLE, raising=False)
    assert storage_argument(None) is None
    monkeypatch.setenv(STORAGE_VARIABLE, "")
    assert storage_argument(None) is None
    monkeypatch.setenv(STORAGE_VARIABLE, "journal:a")
    assert storage_argument(None) == "journal:a"
    assert storage_argument("journal:b") == "journal:b"


@pytest.mark.slow
def test_every_command_reads_it(
    tiny_study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, database = tmp_path / "study", tmp_path / "elsewhere.db"
    monkeypatch.setenv(STORAGE_VARIABLE, f"sqlite:///{database}")
    assert run_main(changed(tiny_study, trials="2")) == 0
    assert database.is_file()
    assert not (study / "study.db").exists()
    assert report.main([str(study), "--format", "short"]) == 0
    assert export.main([str(study), "--config-out", str(tmp_path / "again.json")]) == 0
    asked: list[Any] = []

    def note(study: str | None, storage_url: str | None) -> Any:
        asked.append(storage_url)
        raise OSError("far enough")

    monkeypatch.setattr(dashboard, "open_app", note)
    assert dashboard.main(["--study", str(study)]) == 2
    assert asked == [f"sqlite:///{database}"]
    # The flag wins.
    assert dashboard.main(["--study", str(study), "--storage", "journal:x"]) == 2
    assert asked[1:] == ["journal:x"]
    capsys.readouterr()
    assert report.main([str(study), "--storage", f"sqlite:///{tmp_path / 'none.db'}"]) == 2
    assert "none.db: no such study yet" in capsys.readouterr().err


def test_its_password_is_shown_nowhere(
    tiny_study: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: Any,
) -> None:
    monkeypatch.setenv(STORAGE_VARIABLE, URL)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/study.toml").write_text('model = "m"\nprompts = "p"\n')
    commands = [
        (run.main, tiny_study),
        (report.main, [str(tmp_path / "there")]),
        (export.main, [str(tmp_path / "there"), "--config-out", str(tmp_path / "a.json")]),
        (dashboard.main, ["--study", str(tmp_path / "there")]),
    ]
    for main, arguments in commands:
        error = refused(main, arguments)
        assert "storage postgresql+psycopg://me:***@127.0.0.1:1/db" in error
        assert "s3cret" not in error
        with pytest.raises(SystemExit):
            main(["--help"])
        help_text = capsys.readouterr().out
        assert STORAGE_VARIABLE in help_text
        assert "s3cret" not in help_text


def test_study_toml_says_where_to_look_instead_of_the_password(
    tiny_study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = run.build_parser().parse_args(tiny_study)
    monkeypatch.setenv(STORAGE_VARIABLE, URL)
    given = {"model": flags.model, "prompts": flags.prompts, "storage": storage_argument(None)}
    spec, paths = load_spec(given, str(tmp_path / "study"), demo=tmp_path)
    assert spec.storage == URL
    warned: list[str] = []
    reporter: Any = SimpleNamespace(warn=warned.append, phase=lambda *_words: None)
    run._make_folder(reporter, spec, paths)
    text = paths.spec_file.read_text()
    assert f'storage = "{FROM_ENVIRONMENT}"' in text
    assert "s3cret" not in text
    assert not warned
    # Read again, it is the same storage; without the variable nothing else takes its place.
    assert load_spec({}, str(paths.folder), demo=tmp_path)[0] == spec
    monkeypatch.delenv(STORAGE_VARIABLE)
    with pytest.raises(
        ValueError, match=r"study\.toml: storage: its address is to be set in the environment, as LAYER"
    ):
        load_spec({}, str(paths.folder), demo=tmp_path)
