"""Storages: several processes on one SQLite file, one-line errors without passwords."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from search.storages.address import redact
from search.storages.errors import StorageError
from search.storages.opening import check_storage, check_writable, open_storage
from tests.search.helpers.servers import ROOT, child_environment

WORKER = """
import sys, optuna
from search.storages.opening import open_storage
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.load_study(study_name="s", storage=open_storage(sys.argv[1]))
study.optimize(lambda trial: trial.suggest_int("x", 0, 99), n_trials=int(sys.argv[2]))
"""


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=child_environment(), cwd=ROOT)


@pytest.mark.slow
def test_queued_trials_are_run_once_by_several_processes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    study = optuna.create_study(study_name="s", storage=open_storage(url))
    for x in range(18):
        study.enqueue_trial({"x": x})
    workers = [start(WORKER, url, "6") for _ in range(3)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    values = [trial.value for trial in study.get_trials() if trial.state == TrialState.COMPLETE]
    assert sorted(value for value in values if value is not None) == list(range(18))


def test_a_journal_study_that_others_delete_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"journal:{tmp_path / 'study.log'}"
    other, storage = open_storage(url), open_storage(url)
    append = JournalFileBackend.append_logs
    deleted: list[BaseStorage] = []

    def delete_at_once(backend: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        append(backend, logs)
        if not deleted:
            deleted.append(other)
            other.delete_study(other.get_study_id_from_name("lease"))

    monkeypatch.setattr(JournalFileBackend, "append_logs", delete_at_once)
    made = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "lease")
    assert deleted
    assert open_storage(url).get_study_id_from_name("lease") == made


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("postgresql+psycopg://me:s3cret@host:5432/db", "postgresql+psycopg://me:***@host:5432/db"),
        ("postgresql://me@host/db?sslmode=off&password=s3cret", "postgresql://me@host/db?sslmode=off&password=***"),
        ("mysql://me:a:b@c@host/db", "mysql://me:***@host/db"),
        ("postgresql://me:s3/cr?et@host/db?sslkey=s3cret&pwd=s3cret", "postgresql://me:***@host/db?sslkey=***&pwd=***"),
        ("--storage=postgresql://me:s3cret@host/db", "--storage=postgresql://me:***@host/db"),
        ("journal:/x/y", "journal:/x/y"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize("url", ["nonsense", "nosuchdb://x/y", "postgresql://me:s3cret@127.0.0.1:1/db"])
def test_an_unreachable_storage_is_one_line_without_the_password(url: str) -> None:
    for function in (check_storage, open_storage):
        with pytest.raises(StorageError) as caught:
            function(url)
        assert "\n" not in str(caught.value)
        assert "s3cret" not in str(caught.value)
        assert str(caught.value).startswith(f"storage {redact(url)}: ")


def test_bad_storage_files(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("hello, I am not a database")
    for url, said in [
        (f"sqlite:///{tmp_path / 'text.db'}", "is not an SQLite database"),
        (f"sqlite:///{tmp_path}", "is a folder"),
        (f"sqlite:///{tmp_path / 'a/b/c.db'}", "no such folder"),
    ]:
        with pytest.raises(StorageError, match=said):
            check_storage(url)
    check_storage(f"sqlite:///{tmp_path / 'new.db'}")
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite://"])
def test_a_storage_in_memory_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match=r"^storage .*: must name a file, an in-memory database ends with the run$"):
        check_storage(url)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    # Root ignores permission bits, so a place where nobody can create files stands in for a read-only folder.
    with pytest.raises(PermissionError, match=re.escape("study folder /proc/study: cannot write in /proc")):
        check_writable(Path("/proc/study"))
    check_writable(tmp_path / "new/study")
    assert list(tmp_path.iterdir()) == []
