"""Real servers as fixtures; tests that need them are skipped, with the reason, where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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

__all__ = ["PASSWORD", "ROOT", "PostgresServer", "ProxyServer", "child_environment", "running_proxy"]


@contextmanager
def running_proxy(storage: str, *flags: str, key: str | None = None) -> Iterator[ProxyServer]:
    """A proxy in a process of its own."""
    pytest.importorskip("grpc", reason="needs grpcio: pip install 'layerskip[grpc]'")
    with own_proxy(storage, *flags, key=key) as server:
        yield server


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
