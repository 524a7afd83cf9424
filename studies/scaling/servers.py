"""Servers of one's own, for measurements and tests: a PostgreSQL, and the storage proxy, each in its own process."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSWORD = "s3cret"
"""Known to everybody: the server listens on loopback alone and holds nothing."""
_SETTINGS = {"max_connections": "80", "shared_buffers": "16MB", "logging_collector": "off"}


class NoServer(RuntimeError):  # noqa: N818 (reads as the fact it states)
    """There is no PostgreSQL here, or nobody to run it as."""


def child_environment(**more: str) -> dict[str, str]:
    """For Python children: this tree, one thread."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


class PostgresServer:
    """A PostgreSQL server on a free port, in a folder of its own. `stop` and `start` keep port and data."""

    def __init__(self, binaries: Path, folder: Path, *, durable: bool) -> None:
        self._binaries, self._folder = binaries, folder
        self._data = folder / "data"
        self._owner = _unprivileged()
        self._settings = _SETTINGS | {"fsync": "on" if durable else "off"}
        self._num_databases = 0
        self.port = _free_port()
        if self._owner is not None:
            shutil.chown(folder, self._owner.pw_uid, self._owner.pw_gid)
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        flags = ["--username=tester", f"--pwfile={password}", "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        self._run("initdb", f"--pgdata={self._data}", "--no-sync", *flags)
        self.start()

    def start(self) -> None:
        """Returns once it takes connections."""
        settings = self._settings | {"port": str(self.port), "unix_socket_directories": str(self._folder)}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        log = self._folder / "log"
        self._run("pg_ctl", "start", "--wait", f"--pgdata={self._data}", f"--log={log}", f"--options={options}")

    def stop(self, how: str = "fast") -> None:
        """`fast` ends sessions; `immediate` is a crash, from which the next start recovers."""
        self._run("pg_ctl", "stop", "--wait", f"--mode={how}", f"--pgdata={self._data}")

    def restart(self, how: str = "fast") -> None:
        self.stop(how)
        self.start()

    def new_database(self) -> str:
        """The URL of an empty database."""
        import psycopg

        self._num_databases += 1
        name = f"study{self._num_databases}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        return self._address(name).replace("postgresql:", "postgresql+psycopg:")

    def num_connections(self, url: str) -> int:
        """Of clients to one database, this one apart."""
        import psycopg

        question = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        with psycopg.connect(self._address("postgres")) as connection:
            row = connection.execute(question, [url.rpartition("/")[2]]).fetchone()
        return int(row[0]) if row else 0

    def _address(self, database: str) -> str:
        return f"postgresql://tester:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *arguments: str) -> None:
        owner = self._owner
        who = {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        command = [str(self._binaries / program), *arguments]
        # Not into a pipe: the server inherits it and keeps it open.
        with tempfile.TemporaryFile("w+") as said:
            code = subprocess.call(command, stdout=said, stderr=said, cwd=self._folder, **who)  # type: ignore[call-overload]
            said.seek(0)
            if code:
                raise NoServer(f"{program}: {said.read().strip()}")


def postgres_binaries() -> Path | None:
    """The folder of the newest PostgreSQL, None if there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(folders, key=lambda path: float(path.parts[-3]), default=None)
    return None if newest is None else newest.parent


class ProxyServer:
    """`python -m search.storage_proxy` in front of a database."""

    def __init__(self, storage: str, *flags: str, port: int | None = None, key: str | None = None) -> None:
        self._storage, self._flags, self._key = storage, flags, key
        self.port = port or _free_port()
        self.start()

    @property
    def url(self) -> str:
        """For workers."""
        return f"grpc://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns once it serves."""
        variables = {"LAYERSKIP_STORAGE": self._storage} | (
            {} if self._key is None else {"LAYERSKIP_API_KEY": self._key}
        )
        command = [sys.executable, "-m", "search.storage_proxy", "--port", str(self.port), *self._flags]
        self.process = subprocess.Popen(
            command, env=child_environment(**variables), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        if not self.greeting:
            raise NoServer(f"the proxy ended with code {self.process.wait()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def own_postgres(*, durable: bool) -> Iterator[PostgresServer]:
    """A server for as long as it is needed. Without `durable` it does not wait for the disk.

    Raises: NoServer where none can be had.
    """
    binaries = postgres_binaries()
    if binaries is None:
        raise NoServer("needs PostgreSQL: no initdb in PATH or in /usr/lib/postgresql")
    # Short, because a socket's path is, and not in a folder that is closed to the server's account.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        server = PostgresServer(binaries, folder, durable=durable)
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_proxy(storage: str, *flags: str, key: str | None = None) -> Iterator[ProxyServer]:
    """A proxy for as long as it is needed."""
    server = ProxyServer(storage, *flags, key=key)
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)


def _unprivileged() -> pwd.struct_passwd | None:
    """Whom the server runs as: PostgreSQL refuses root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NoServer("PostgreSQL refuses root, and there is neither an account postgres nor nobody")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
