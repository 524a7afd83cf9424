"""A study in one small file: read as the study itself, where there is none; never resumed, and never written half."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from search import dashboard, export, report
from search.compact import read_lines, write_lines
from search.dashboard import open_app
from search.reporting.archive import read_archive, write_archive
from search.reporting.source import Address, opened
from search.storages.opening import close_storage, open_storage
from tests.search.helpers.fakes import Bench
from tests.search.helpers.servers import get_json, serving

ARCHIVE = "study.jsonl.xz"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search on fakes, never changed: its database and what the run left beside it."""
    folder = tmp_path_factory.mktemp("finished")
    spec = {"model": str(folder / "model"), "prompts": str(folder / "p.jsonl"), "held_out": "/elsewhere/h.jsonl"}
    assert Bench(folder, in_sqlite=True).run(trials=6, num_confirm_prompts=5, confirm_repeats=1, **spec) == 0
    (folder / "study.toml").write_text('model = "fake"\nprompts = "./p.jsonl"\n', encoding="utf-8")
    return folder


@pytest.fixture
def archived(finished: Path, tmp_path: Path) -> Path:
    """A fresh clone's folder of the same study: all but the database."""
    folder = tmp_path / "clone" / finished.name
    folder.mkdir(parents=True)
    for name in ("study.toml", "best.json", "summary.json", ARCHIVE):
        shutil.copy(finished / name, folder / name)
    return folder


def told(study: Path, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert report.main([str(study), "--format", form]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("form", ["json", "csv", "short"])
def test_the_report_of_an_archive_is_that_of_the_study(
    finished: Path, archived: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, again = told(finished, form, capsys), told(archived, form, capsys)
    again = again.replace("sqlite:///./", f"sqlite:///{finished}/")  # where it was stored
    assert again.replace(str(archived), str(finished)) == whole
    assert not (archived / "study.db").exists()


def test_every_trial_is_there_as_it_was(finished: Path, archived: Path) -> None:
    with opened(Address(str(finished)), demo=finished) as one, opened(Address(str(archived)), demo=finished) as other:
        studies = [source.load() for source in (one, other)]
        fields = ("number", "state", "values", "params", "distributions", "user_attrs", "intermediate_values")
        times = ("datetime_start", "datetime_complete")
        trials = [[tuple(getattr(t, name) for name in (*fields, *times)) for t in s.trials] for s in studies]
        assert trials[0] == trials[1]
        assert len(trials[0]) == 6
        unlike = ("spec", "attached", "worker.00")
        attrs = [{k: v for k, v in study.user_attrs.items() if k not in unlike} for study in studies]
        assert attrs[0] == attrs[1]
        assert studies[0].metric_names == studies[1].metric_names == ["tokens_per_s"]
        assert (one.archive, other.archive) == (None, archived / ARCHIVE)


def test_paths_are_those_of_the_folder_that_it_lies_in(finished: Path, archived: Path) -> None:
    lines = read_lines(archived / ARCHIVE)
    assert str(finished) not in json.dumps(lines)
    study = optuna.load_study(study_name=finished.name, storage=read_archive(archived / ARCHIVE))
    spec = study.user_attrs["spec"]
    assert (spec["model"], spec["prompts"]) == (str(archived / "model"), str(archived / "p.jsonl"))
    assert spec["held_out"] == "/elsewhere/h.jsonl"


def test_paths_one_folder_up_are_relative_too(tmp_path: Path) -> None:
    """A regime's study lies in a folder of the whole search's, with which it shares model, prompts and database."""
    whole, spec = tmp_path / "whole", {"gamma_max": 8, "held_out": f"{tmp_path}/h.jsonl"}
    study = optuna.create_study(study_name="whole/t1", direction="maximize")
    paths = {"model": f"{whole}/model", "prompts": f"{whole}/t1/p.jsonl", "storage": f"sqlite:///{whole}/study.db"}
    study.set_user_attr("spec", spec | paths)
    (whole / "t1").mkdir(parents=True)
    write_archive(study, whole / "t1" / ARCHIVE)
    text = json.dumps(read_lines(whole / "t1" / ARCHIVE))
    assert str(whole) not in text
    assert "sqlite:///../study.db" in text
    (tmp_path / "clone").mkdir()
    moved = (whole / "t1").rename(tmp_path / "clone" / "t1")
    read = optuna.load_study(study_name="whole/t1", storage=read_archive(moved / ARCHIVE)).user_attrs["spec"]
    assert (read["model"], read["prompts"]) == (f"{tmp_path}/clone/model", f"{tmp_path}/clone/t1/p.jsonl")
    assert read["held_out"] == f"{tmp_path}/h.jsonl"


def test_an_archive_stands_in_for_a_database_that_the_study_names(
    archived: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (archived / "study.toml").open("a", encoding="utf-8") as file:
        file.write(f'storage = "sqlite:///../gone.db"\nstudy_name = "{archived.name}"\n')
    assert len(json.loads(told(archived, "json", capsys))["trials"]) == 6
    assert not (archived.parent / "gone.db").exists()


def test_the_dashboard_shows_an_archive_and_leaves_it_alone(archived: Path) -> None:
    before = (archived / ARCHIVE).read_bytes()
    app, page, archive = open_app(str(archived), None)
    assert archive == archived / ARCHIVE
    with serving(app) as address:
        url = f"{address}/api/studies/{page.rpartition('/')[2]}"
        before_it = get_json(url)
        note = json.dumps({"body": "mine", "version": before_it["note"]["version"] + 1}).encode()
        request = urllib.request.Request(f"{url}/note", note, {"Content-Type": "application/json"}, method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        after_it = get_json(url)
    assert len(after_it["trials"]) == 6
    assert before_it["note"]["body"].startswith("**Speculate")
    assert after_it["note"]["body"] == "mine"
    assert before_it["plotly_graph_objects"]
    assert (archived / ARCHIVE).read_bytes() == before
    assert not (archived / "study.db").exists()


def test_the_dashboard_says_that_changes_are_not_kept(
    archived: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_server: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("search.dashboard._Server.serve_forever", interrupted)
    assert dashboard.main(["--study", str(archived), "--port", "0"]) == 0
    assert f"Read from {archived / ARCHIVE}: what is changed in the dashboard is not kept." in capsys.readouterr().out


def test_a_run_beside_an_archive_begins_a_new_study(archived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And from then on the database is what is read."""
    before = (archived / ARCHIVE).read_bytes()
    bench = Bench(archived, in_sqlite=True)
    bench.run(trials=2, num_confirm_prompts=5, confirm_repeats=1)
    assert "0 of 2 trials done" in bench.output.getvalue()
    assert (archived / ARCHIVE).read_bytes() == before, "nothing is published here"
    assert len(json.loads(told(archived, "json", capsys))["trials"]) == 2


@pytest.mark.publishes
def test_a_run_writes_the_archive_once_it_has_a_verdict(bench: Bench) -> None:
    bench.decoder.break_on = lambda _config: KeyboardInterrupt() if bench.decoder.num_decoded > 100 else None
    with pytest.raises(KeyboardInterrupt):
        bench.run(trials=30)
    assert bench.paths.report.exists()
    assert not bench.paths.archive.exists()
    bench.decoder.break_on = lambda _config: None
    assert bench.run(trials=6, num_confirm_prompts=5, confirm_repeats=1) == 0
    study = optuna.load_study(study_name=bench.folder.name, storage=read_archive(bench.paths.archive))
    assert study.user_attrs["verdict"] == "speculate"
    storage = open_storage(bench.url)
    figures = optuna.load_study(study_name=bench.folder.name, storage=storage)
    kept = read_archive(bench.paths.archive).get_study_system_attrs(study._study_id)
    assert any(name.startswith("dashboard:plot_data:") for name in kept)
    # The files that the dashboard offers lie beside the study, and are not in the archive.
    assert "attached" in figures.user_attrs
    assert "attached" not in study.user_attrs
    assert not [name for name in kept if name.startswith("artifacts:")]
    close_storage(storage)


def test_the_command_writes_it_and_from_an_archive_the_same_again(
    finished: Path, archived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for study in (finished, archived):
        file = study / "again.xz"
        assert export.main([str(study), "--archive", str(file)]) == 0
        assert f"written {file}: " in capsys.readouterr().out
        assert file.read_bytes() == (finished / ARCHIVE).read_bytes()
    assert export.main([str(finished), "--archive", str(tmp_path / "no" / "where.xz")]) == 2
    assert "--archive: no such folder" in capsys.readouterr().err
    assert export.main([str(finished), "--archive", "a.xz", "--config-out", "b.json"]) == 2
    assert "--config-out FILE or --archive FILE" in capsys.readouterr().err


def broken(lines: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "nothing", []
    yield "no journal", [{"a": 1}]
    yield "no study", lines[1:]
    yield "another operation", [*lines, lines[0] | {"op_code": 99}]
    yield "two studies", [*lines, lines[0] | {"study_name": "other"}]
    yield "a spec of paths that are none", [_with_model(one, 5) if _is_spec(one) else one for one in lines]


def _is_spec(line: dict[str, Any]) -> bool:
    return "spec" in line.get("user_attr", {})


def _with_model(line: dict[str, Any], model: object) -> dict[str, Any]:
    return line | {"user_attr": {"spec": line["user_attr"]["spec"] | {"model": model}}}


def test_what_is_no_archive_is_one_line(archived: Path, refused: Any) -> None:
    file = archived / ARCHIVE
    lines = read_lines(file)
    for name, changed in broken(lines):
        write_lines(file, changed)
        if name == "a spec of paths that are none":
            assert report.main([str(archived), "--format", "csv"]) == 0
            continue
        assert f"{ARCHIVE}: not the archive of a study" in refused(report.main, [str(archived), "--format", "csv"]), (
            name
        )
    file.write_bytes(b"half")
    assert f"{ARCHIVE}: not a whole xz file" in refused(report.main, [str(archived)])


def test_a_study_of_another_name_is_told(archived: Path, refused: Any) -> None:
    error = refused(report.main, [str(archived), "--study-name", "other"])
    assert f"{ARCHIVE}: has no study 'other', only: {archived.name}" in error
    error = refused(report.main, [str(archived), "--storage", f"sqlite:///{archived / 'study.db'}"])
    assert "study.db: no such study yet" in error
