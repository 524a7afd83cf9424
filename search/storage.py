"""Optuna storages: one helper that makes SQLite safe for several processes, and one-line errors for all of them."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage

SQLITE = "sqlite:///"
JOURNAL = "journal:"
HEARTBEAT_S = 60
GRACE_S = 300
"""A trial without a sign of life for this long is dead. Far above any pause of a live worker, which would crash."""
_CONNECT_TIMEOUT_S = 5
_LOCK_TIMEOUT_S = 60
_SECRET = re.compile("pass|pwd|secret|token|key", re.IGNORECASE)


class StorageError(ValueError):
    """The storage cannot be reached or read; the message is one line and holds no password."""


def open_storage(url: str) -> BaseStorage:
    """The storage behind a URL: `sqlite:///PATH`, another RDB URL, or `journal:PATH`.

    Raises: StorageError in one line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats: no change since 2.x
            if url.startswith(JOURNAL):
                return _open_journal(url)
            if url.startswith(SQLITE):
                return _open_sqlite(url)
            return RDBStorage(
                url,
                engine_kwargs={"pool_pre_ping": True, "connect_args": _connect_args(url)},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
            )
    except Exception as error:  # noqa: BLE001 (drivers raise what they like; each is the user's to read in one line)
        raise StorageError(f"storage {redact(url)}: {_one_line(error, url)}") from None


def close_storage(storage: BaseStorage) -> None:
    """Close connections, so that SQLite folds its write-ahead log into the one file."""
    storage.remove_session()
    engine = getattr(storage, "engine", None)
    if engine is not None:
        engine.dispose()


def check_storage(url: str) -> None:
    """Cheap check before anything slow: a reachable server, or a file in a writable folder. Writes nothing.

    Raises: StorageError in one line.
    """
    path = storage_file(url)
    try:
        if path is None:
            _connect_once(url)
        elif path.is_dir():
            raise IsADirectoryError("is a folder, must be a file")
        elif not path.parent.is_dir() and not path.parent.parent.is_dir():
            raise FileNotFoundError(f"no such folder: {path.parent}")
        elif path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError("file is not writable")
        elif url.startswith(SQLITE) and path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(15) != b"SQLite format 3":
                    raise ValueError("is not an SQLite database")
    except Exception as error:  # noqa: BLE001 (see open_storage)
        raise StorageError(f"storage {redact(url)}: {_one_line(error, url)}") from None


def check_writable(folder: Path) -> None:
    """Make sure files can be created in the study folder, by creating one (root ignores permission bits).

    Raises: PermissionError in one line. The nearest existing parent is tried where the folder does not exist yet.
    """
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".search-", suffix=".tmp"):
            pass
    except OSError as error:
        raise PermissionError(f"study folder {folder}: cannot write in {nearest}: {error.strerror}") from None


def storage_file(url: str) -> Path | None:
    """The file behind an SQLite or journal storage; None for servers."""
    for prefix in (SQLITE, JOURNAL):
        if url.startswith(prefix):
            return Path(url.removeprefix(prefix).partition("?")[0])
    return None


def redact(url: str) -> str:
    """The URL for terminals and files: without its password, a path below the working directory relative to it."""
    file = storage_file(url)
    if file is not None:
        return url.replace(str(file), near(file), 1)
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    # A password may hold "/" and "?" (SQLAlchemy ends it at "@" alone), so the account ends at the last "@".
    account, at, tail = rest.rpartition("@")
    if at and ":" in account:
        account = account.partition(":")[0] + ":***"
    path, question, query = tail.partition("?")
    pairs = [
        f"{name}=***" if _SECRET.search(name) else f"{name}{equals}{value}"
        for name, equals, value in (pair.partition("=") for pair in query.split("&"))
    ]
    return f"{scheme}{mark}{account}{at}{path}{question}{'&'.join(pairs) if question else ''}"


def holds_secret(url: str) -> bool:
    """Whether the URL is one not to show as it is."""
    return storage_file(url) is None and redact(url) != url


def near(path: Path) -> str:
    """The path as a person would type it here: relative where it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _open_sqlite(url: str) -> RDBStorage:
    """WAL, synchronous=NORMAL, and every transaction BEGIN IMMEDIATE.

    SQLite ignores SELECT ... FOR UPDATE, by which Optuna claims queued trials, so with its default deferred
    transactions two processes run the same queued trial and one of them dies.
    """
    from sqlalchemy import event

    storage = RDBStorage(
        url,
        engine_kwargs={"connect_args": {"timeout": _LOCK_TIMEOUT_S}},
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
    )

    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; on_begin does
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", on_connect)
    event.listen(storage.engine, "begin", on_begin)
    storage.engine.dispose()  # connections made before the listeners
    return storage


def _open_journal(url: str) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(url.removeprefix(JOURNAL)))


def _connect_args(url: str) -> dict[str, Any]:
    return {"connect_timeout": _CONNECT_TIMEOUT_S} if url.startswith(("postgresql", "mysql")) else {}


def _connect_once(url: str) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(url, connect_args=_connect_args(url))
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _one_line(error: Exception, url: str) -> str:
    first = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    first = next((line.strip() for line in first.splitlines() if line.strip()), type(error).__name__)
    return first.replace(url, redact(url))
