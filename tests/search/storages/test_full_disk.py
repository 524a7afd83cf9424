"""A full disk: one line that says so, nothing half-written, and the study goes on once there is space."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import DecodeConfig
from layerskip.config.decode_config import write_atomically
from search.storages.address import storage_file
from search.storages.errors import StorageFull
from search.storages.opening import close_storage, open_storage
from search.study.trials import counted
from tests.search.helpers.fakes import Bench
from tests.search.helpers.servers import ROOT, child_environment

FILE_LIMIT = """
import resource, sys, optuna
from pathlib import Path
from layerskip.config.decode_config import write_atomically
from search.storages.address import storage_file
from search.storages.errors import StorageFull
from search.storages.opening import close_storage, open_storage
url = sys.argv[1]
storage = open_storage(url)
study = optuna.create_study(study_name="s", storage=storage)
study.set_user_attr("kept", 1)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
largest = max(file.stat().st_size for file in storage_file(url).parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 300, hard))
for i in range(100):
    try:
        study.set_user_attr("lost", f"{i}" + "x" * 5000)
    except StorageFull as error:
        print(i, error)
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
study.set_user_attr("after", 2)
close_storage(storage)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip(f"needs root and the right to mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """The file that takes all space there is."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return filler


def fill_at(folder: Path, decode: int) -> Callable[[DecodeConfig], None]:
    """A hook for the fake decoder: the disk is full from this decode on."""
    calls = iter(range(10**9))

    def hook(_config: DecodeConfig) -> None:
        if next(calls) == decode:
            fill(folder)

    return hook


def url_of(kind: str, folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}" if kind == "sqlite" else f"journal:{folder / 'study.log'}"


def assert_whole(url: str) -> None:
    """Every byte of the storage can be read."""
    file = storage_file(url)
    assert file is not None
    if url.startswith("journal:"):
        lines = file.read_text().split("\n")
        assert lines[-1] == "", "the last line is torn"
        assert all(isinstance(json.loads(line), dict) for line in lines[:-1])
        return
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def finished(url: str, name: str) -> list[tuple[object, ...]]:
    storage = open_storage(url)
    trials = optuna.load_study(study_name=name, storage=storage).get_trials()
    close_storage(storage)
    assert not [trial for trial in trials if not trial.state.is_finished()]
    assert counted(trials) == 12
    return [(trial.params, trial.value) for trial in trials if trial.state == TrialState.COMPLETE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_search_on_a_full_disk_stops_in_one_line_and_goes_on_once_there_is_space(
    small_disk: Path, tmp_path: Path, kind: str
) -> None:
    url = url_of(kind, small_disk)
    bench = Bench(small_disk / "study")
    bench.folder.mkdir()
    bench.decoder.break_on = fill_at(small_disk, 70)
    with pytest.raises(StorageFull) as caught:
        bench.run(trials=12, storage=url)
    assert re.fullmatch(
        rf"storage {re.escape(url)}: (no space is left on its disk|cannot be written: [^:]+); "
        r"once there is space the same command continues the study",
        str(caught.value),
    )
    assert not bench.paths.best.exists()
    (small_disk / "filler").unlink()
    resumed = Bench(bench.folder)
    assert resumed.run(trials=12, storage=url) == 0
    assert_whole(url)
    whole = Bench(tmp_path / "study")
    whole.folder.mkdir()
    assert whole.run(trials=12) == 0
    assert finished(url, "study") == finished(whole.url, "study")


def test_best_json_is_the_old_one_or_the_new_one(small_disk: Path) -> None:
    bench = Bench(small_disk / "study", in_sqlite=True)
    bench.folder.mkdir()
    assert bench.run(trials=6) == 0
    again = Bench(bench.folder, in_sqlite=True)
    assert again.run(trials=6) == 0  # measures the held-out prompts alone, and decides again
    before, total = bench.paths.best.read_bytes(), again.decoder.num_decoded
    broken = Bench(bench.folder, in_sqlite=True)
    broken.decoder.break_on = fill_at(small_disk, total - 1)  # the last decode of the confirm stage
    with pytest.raises(OSError, match=r"No space left on device: .*/study/best\.json'"):
        broken.run(trials=6)
    assert bench.paths.best.read_bytes() == before
    assert [path.name for path in bench.folder.iterdir() if path.suffix == ".tmp"] == []
    (small_disk / "filler").unlink()
    assert Bench(bench.folder, in_sqlite=True).run(trials=6) == 0
    DecodeConfig.load(bench.paths.best)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_writes_that_the_system_refuses(tmp_path: Path, kind: str) -> None:
    # A limit on the size of files needs no rights, and ends a write in the middle as a full disk does.
    url = url_of(kind, tmp_path)
    command = [sys.executable, "-c", FILE_LIMIT, url]
    done = subprocess.run(
        command, env=child_environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    num_stored, said = done.stdout.split(" ", 1)
    assert said.startswith(f"storage {url}: cannot be written: ")
    assert said.count("\n") == 1
    assert_whole(url)
    storage = open_storage(url)
    attributes = optuna.load_study(study_name="s", storage=storage).user_attrs
    stored = {"lost": f"{int(num_stored) - 1}{'x' * 5000}"} if int(num_stored) else {}  # the last that was not refused
    assert attributes == {"kept": 1, "after": 2, **stored}
    close_storage(storage)


@pytest.mark.parametrize("torn", [b"{", b'{"op_code":2,"worker_id":"a","study_id":0,"user_attr":{"b":', b"x" * 200_000])
def test_a_torn_last_line_of_a_journal_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    url = url_of("journal", tmp_path)
    study = optuna.create_study(study_name="s", storage=open_storage(url))
    study.set_user_attr("a", 1)
    file = tmp_path / "study.log"
    with file.open("ab") as journal:
        journal.write(torn)
    reader = optuna.load_study(study_name="s", storage=open_storage(url))
    assert reader.user_attrs == {"a": 1}
    study.set_user_attr("b", 2)
    assert reader.user_attrs == {"a": 1, "b": 2}
    assert_whole(url)
    assert optuna.load_study(study_name="s", storage=open_storage(url)).user_attrs == {"a": 1, "b": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study.log"]


def test_a_refused_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "best.json"
    file.write_text("old")

    def refuse(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{file}'")):
        write_atomically(file, "new")
    with pytest.raises(OSError, match=r"No such file or directory: '/nowhere/best.json'$"):
        write_atomically(Path("/nowhere/best.json"), "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.undo()
    with pytest.raises(OSError, match=rf"Is a directory: '{re.escape(str(tmp_path))}'$"):
        write_atomically(tmp_path, "new")
