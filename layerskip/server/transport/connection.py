"""Connection: uvicorn's HTTP/1.1, which gives up on who stalls, and answers what is no HTTP as everything else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from layerskip.server.errors import ApiError
from layerskip.server.settings import ServerSettings


class Connection(H11Protocol):
    """Drops a client that begins a request and does not get through its head, or takes nothing of its answer.

    The application must have its settings in `app.state.service.settings`.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        app: Any = self.config.app
        self._settings: ServerSettings = app.state.service.settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The head of the first request is waited for from here on."""
        super().connection_made(transport)
        # Whatever the client's side has no room for counts as pending, and holds up who sends it.
        transport.set_write_buffer_limits(high=0)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """The body has a time limit of its own, see `read_body`."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting_for_head()
        elif self._head_timer is None:
            self._await_head()

    def pause_writing(self) -> None:
        """Something is pending."""
        super().pause_writing()
        self._await_progress()

    def resume_writing(self) -> None:
        """Nothing is."""
        self._stop_waiting_for_progress()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """However it ended."""
        self._stop_waiting_for_head()
        self._stop_waiting_for_progress()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """As any refusal; unless the answer to an earlier request is under way, which this would get into."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps(ApiError(400, f"request: {msg}").body()).encode("ascii")
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        answer = h11.Response(status_code=400, headers=headers, reason=STATUS_PHRASES[400])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.body_timeout_s, self.transport.close)

    def _stop_waiting_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_progress(self) -> None:
        pending = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._settings.send_timeout_s, self._check_progress, pending)

    def _stop_waiting_for_progress(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_progress(self, pending: int) -> None:
        if self.transport.get_write_buffer_size() < pending:
            self._await_progress()
        else:
            # Not close(), which would wait for the client to take what is pending.
            self.transport.abort()
