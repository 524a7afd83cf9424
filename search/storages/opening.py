"""Optuna storages by URL: open, check and close, with one-line errors for all of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.storages import BaseStorage

from search.storages.address import GRPC, JOURNAL, SQLITE, is_in_memory, redact, storage_file
from search.storages.database import connect_once, open_server, open_sqlite
from search.storages.errors import StorageError, StorageFull, one_line
from search.storages.journal import open_journal
from search.storages.patient import PatientStorage, RetryPolicy


def open_storage(url: str, *, policy: RetryPolicy | None = None) -> BaseStorage:
    """The storage behind a URL: `sqlite:///PATH`, a database server, `grpc://HOST:PORT`, or `journal:PATH`.

    Servers that go away later are waited for as long as `policy` says; see `PatientStorage`.
    Raises: StorageError in one line.
    """
    try:
        if url.startswith(JOURNAL):
            return open_journal(url)
        if url.startswith(SQLITE):
            return open_sqlite(url)
        if url.startswith(GRPC):
            from search.storages.proxy_client import open_proxy

            return open_proxy(url, policy)
        return open_server(url, policy)
    except StorageFull:
        raise
    except Exception as error:  # noqa: BLE001 (drivers raise what they like; each is the user's to read in one line)
        raise StorageError(f"storage {redact(url)}: {one_line(error, url)}") from None


def close_storage(storage: BaseStorage) -> None:
    """Close connections, so that SQLite folds its write-ahead log into the one file."""
    inner = storage.inner if isinstance(storage, PatientStorage) else storage
    inner.remove_session()
    backend = getattr(inner, "_backend", inner)  # Optuna's cache around a database
    if (engine := getattr(backend, "engine", None)) is not None:
        engine.dispose()
    elif hasattr(backend, "close"):
        backend.close()


@contextmanager
def storage_at(url: str) -> Iterator[BaseStorage]:
    """The storage behind a URL, closed again at the end. Raises: as `open_storage`."""
    storage = open_storage(url)
    try:
        yield storage
    finally:
        close_storage(storage)


def check_storage(url: str) -> None:
    """Cheap check before anything slow: a reachable server, or a file in a writable folder. Leaves nothing.

    Raises: StorageError in one line.
    """
    path = storage_file(url)
    try:
        if is_in_memory(url):
            raise ValueError("must name a file, an in-memory database ends with the run")
        if url.startswith(GRPC):
            from search.storages.proxy_client import probe

            probe(url)
        elif path is None:
            connect_once(url)
        elif path.is_dir():
            raise IsADirectoryError("is a folder, must be a file")
        elif not path.parent.is_dir() and not path.parent.parent.is_dir():
            raise FileNotFoundError(f"no such folder: {path.parent}")
        elif path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError("file is not writable")
        elif not path.exists() and (refusal := _refuses_files(path.parent)):
            raise PermissionError(f"cannot write in {refusal}")
        elif url.startswith(SQLITE) and path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(15) != b"SQLite format 3":
                    raise ValueError("is not an SQLite database")
    except Exception as error:  # noqa: BLE001 (see open_storage)
        raise StorageError(f"storage {redact(url)}: {one_line(error, url)}") from None


def check_writable(folder: Path) -> None:
    """Make sure that files can be created in the study folder. Raises: PermissionError in one line."""
    if refusal := _refuses_files(folder):
        raise PermissionError(f"study folder {folder}: cannot write in {refusal}")


def _refuses_files(folder: Path) -> str | None:
    """Why no file can be created in a folder, or in the nearest existing one above it; found by creating one, as root
    ignores permission bits. None where one can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".search-", suffix=".tmp"):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"
