"""Real servers as fixtures; tests that need them are skipped, with the reason, where there are none."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from search.dashboard import bind
from studies.scaling.servers import (
    PASSWORD,
    ROOT,
    NoServer,
    PostgresServer,
    ProxyServer,
    child_environment,
    own_postgres,
    own_proxy,
)

__all__ = [
    "PASSWORD",
    "ROOT",
    "PostgresServer",
    "ProxyServer",
    "child_environment",
    "get_json",
    "running_proxy",
    "serving",
]


@contextmanager
def running_proxy(storage: str, *flags: str, key: str | None = None) -> Iterator[ProxyServer]:
    """A proxy in a process of its own."""
    pytest.importorskip("grpc", reason="needs grpcio: pip install 'layerskip[grpc]'")
    with own_proxy(storage, *flags, key=key) as server:
        yield server


@contextmanager
def serving(app: Callable[..., Any]) -> Iterator[str]:
    """The address, without a slash at its end, of a WSGI app that is served on loopback."""
    with bind(app, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for all tests of a process; tests that stop it start it again."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'layerskip[postgres]'")
    try:
        with own_postgres(durable=False) as server:
            yield server
    except NoServer as reason:
        pytest.skip(str(reason))


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database."""
    return postgres_server.new_database()


@pytest.fixture
def grpc_url(postgres_url: str) -> Iterator[str]:
    """A proxy in front of an empty database."""
    with running_proxy(postgres_url) as proxy:
        yield proxy.url
