"""Open a study that exists, or the archive of one, for reading: never creates a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import BaseStorage

from search.reporting.archive import read_archive
from search.storages.address import near, redact, storage_file
from search.storages.opening import check_storage, close_storage, open_storage
from search.study.spec import StudyPaths, load_spec


@dataclass(frozen=True)
class Source:
    """A study's folder, its open storage and its name in there."""

    paths: StudyPaths
    storage: BaseStorage
    name: str
    archive: Path | None = None
    """The file that it was read from instead of a storage: what is changed is not kept."""

    def load(self) -> optuna.Study:
        """The study."""
        return optuna.load_study(study_name=self.name, storage=self.storage)


@dataclass(frozen=True)
class Address:
    """Where a study is, as a user says it; None = not said."""

    study: str | None
    """Folder, or its study.toml."""
    storage_url: str | None = None
    study_name: str | None = None


def open_source(address: Address, *, demo: Path) -> Source:
    """The caller closes its storage. Raises: ValueError or FileNotFoundError in one line."""
    given = address.study
    if given is not None and not (file := _study_file(given)).is_file():
        raise FileNotFoundError(f"{file}: no such file; a study is a folder with a study.toml")
    flags = {"storage": address.storage_url, "study_name": address.study_name}
    spec, paths = load_spec(flags, given, demo=demo)
    url, name = paths.storage_url(spec), paths.study_name(spec)
    database, archive = storage_file(url), None
    if database is not None and not database.is_file():
        if address.storage_url is not None or not paths.archive.is_file():
            raise FileNotFoundError(f"{database}: no such study yet; run python -m search.run first")
        archive = paths.archive
        storage = read_archive(archive)
    else:
        check_storage(url)
        storage = open_storage(url)
    names = optuna.get_all_study_names(storage)
    if name not in names:
        close_storage(storage)
        where = f"storage {redact(url)}" if archive is None else near(archive)
        raise ValueError(f"{where}: has no study {name!r}, only: {', '.join(names) or 'none'}")
    return Source(paths, storage, name, archive)


@contextmanager
def opened(address: Address, *, demo: Path) -> Iterator[Source]:
    """The same, closed afterwards."""
    source = open_source(address, demo=demo)
    try:
        yield source
    finally:
        close_storage(source.storage)


def _study_file(study: str) -> Path:
    path = Path(study).expanduser()
    return path if path.suffix == ".toml" else path / "study.toml"
