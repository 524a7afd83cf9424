"""Databases by SQLAlchemy: SQLite made safe for several processes, and servers that may restart."""

from __future__ import annotations

import random
import re
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage, RDBStorage, get_storage

from search.storages.address import redact
from search.storages.errors import ConnectionLost, StorageFull, one_line
from search.storages.patient import PatientStorage, RetryPolicy

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine, ExceptionContext

_CONNECT_TIMEOUT_S = 5
_LOCK_TIMEOUT_S = 60
_TABLE_ATTEMPTS = 8
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""Notices within a minute that a server's host vanished without a word. Known to libpq."""


def open_sqlite(url: str) -> BaseStorage:
    """WAL, synchronous=NORMAL, and every transaction BEGIN IMMEDIATE.

    SQLite ignores SELECT ... FOR UPDATE, by which Optuna claims queued trials, so with its default deferred
    transactions two processes run the same queued trial and one of them dies.
    """
    from sqlalchemy import event

    storage = _with_tables(url, {"connect_args": {"timeout": _LOCK_TIMEOUT_S}})

    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; on_begin does
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", on_connect)
    event.listen(storage.engine, "begin", on_begin)
    _name_errors(storage.engine, url)
    storage.engine.dispose()  # connections made before the listeners
    return storage


def open_server(url: str, policy: RetryPolicy | None = None) -> PatientStorage:
    """A database server; one that restarts under a run is waited for."""
    storage = _with_tables(url, {"pool_pre_ping": True, "connect_args": _connect_args(url)})
    _name_errors(storage.engine, url)

    def judge(error: Exception) -> Exception:
        """Optuna's advice for every failed commit, replaced by what the database said."""
        cause = getattr(error.__cause__, "orig", None)
        if isinstance(error, optuna.exceptions.StorageInternalError) and cause is not None:
            return optuna.exceptions.StorageInternalError(one_line(cause, url))
        return error

    return PatientStorage(get_storage(storage), redact(url), policy, judge=judge)


def connect_once(url: str) -> None:
    """Raises whatever the driver does, if nothing answers."""
    from sqlalchemy import create_engine

    engine = create_engine(url, connect_args=_connect_args(url))
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _with_tables(url: str, engine_kwargs: dict[str, Any]) -> RDBStorage:
    """Workers that start together on an empty database all create its tables: who is late looks again.

    Without Optuna's heartbeat, which a journal and the proxy do not have: the roster of the workers has its own.
    """
    from sqlalchemy.exc import DBAPIError

    for attempts_left in reversed(range(_TABLE_ATTEMPTS)):
        try:
            return RDBStorage(url, engine_kwargs=engine_kwargs)
        except DBAPIError as error:
            if not attempts_left or not re.search("already exists|duplicate key|UNIQUE constraint", str(error.orig)):
                raise
            time.sleep(random.uniform(0.05, 0.5))
    raise AssertionError("not reached")


def _connect_args(url: str) -> dict[str, Any]:
    driver = url.partition(":")[0]
    if driver in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        return {"connect_timeout": _CONNECT_TIMEOUT_S, **_KEEPALIVE}
    return {"connect_timeout": _CONNECT_TIMEOUT_S} if driver.startswith(("postgresql", "mysql")) else {}


def _name_errors(engine: Engine, url: str) -> None:
    """Have a full disk and a lost connection raised as what they are, wherever in a transaction they show."""
    from sqlalchemy import event
    from sqlalchemy.exc import OperationalError

    def on_error(context: ExceptionContext) -> Exception | None:
        error = context.original_exception
        if (reason := _no_space(error)) is not None:
            return StorageFull(url, reason)
        if context.is_pre_ping:
            return None  # the pool looked whether a connection is alive, and makes a new one
        # Without a connection: one that could not be made. Opening the storage raised such errors before.
        refused = context.connection is None and isinstance(context.sqlalchemy_exception, OperationalError)
        if context.is_disconnect or refused:
            return ConnectionLost(one_line(error, url))
        return None

    event.listen(engine, "handle_error", on_error)


def _no_space(error: BaseException) -> str | None:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind of error
        if code == sqlite3.SQLITE_FULL:
            return "no space is left on its disk"
        return f"cannot be written: {error}" if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY) else None
    # SQLSTATE 53100, disk_full, however the driver spells it.
    full = "53100" in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None))
    return "no space is left on the server's disk" if full else None
