"""Run the application: bind first, serve, and end without cutting off who is being answered."""

from __future__ import annotations

import signal
import socket
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from layerskip.server.errors import shutting_down
from layerskip.server.transport.connection import Connection
from layerskip.server.worker import DecodeWorker

_CLOSE_TIMEOUT_S = 5


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address, not yet listening; port 0 takes any free one.

    Raises: OSError in one line if the address is taken or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"cannot serve on {host}: {error.strerror or error}") from None
    try:
        # The port of a server that has just ended may be taken again at once.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot serve on {host}:{port}: {error.strerror or error}; try another --port") from None
    return bound


class GracefulServer(uvicorn.Server):
    """SIGTERM or SIGINT: new requests get 503 and those admitted go on, for `grace_s` seconds; the rest is ended then.

    A second signal ends them at once. After either, `run` returns.
    """

    def __init__(self, app: Starlette, grace_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            # Named, or whatever faster one happens to be installed would be taken: another than the tests ran with.
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
        super().__init__(config)
        self._worker: DecodeWorker = app.state.service.worker
        app.state.service.num_connections = lambda: len(self.server_state.connections)
        self._grace_s = grace_s
        self._num_signals = 0
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's arguments
        """In the middle of anything: it only counts; `on_tick` acts."""
        self._num_signals += 1
        if self._num_signals > 2 and sig == signal.SIGINT:
            self.force_exit = True

    def stop(self) -> None:
        """As a first signal does; from any thread."""
        self._num_signals = max(self._num_signals, 1)

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: True ends the server."""
        if self._num_signals and self._drain_until is None:
            self._worker.drain()
            self._drain_until = time.monotonic() + self._grace_s
        if self._drain_until is not None:
            is_over = self._num_signals > 1 or time.monotonic() >= self._drain_until
            if is_over:
                self._worker.cancel_all(shutting_down())
            if is_over or self._worker.num_admitted == 0:
                self.should_exit = True
        return await super().on_tick(counter)
