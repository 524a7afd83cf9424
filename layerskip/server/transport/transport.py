"""The two ends of a request on the wire: read a body within its limits, send an answer to a client that may leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from layerskip.server.answers import AnswerFormat, error_event
from layerskip.server.errors import ApiError
from layerskip.server.settings import ServerSettings
from layerskip.server.worker import DecodeWorker, Event, Finished, Job, Piece

CLIENT_LEFT = 499
"""nginx's status for a client that closed the connection; counted and logged, never sent."""

_RECORD_KEY = "layerskip.record"
_DISCARD_FACTOR = 64


@dataclass
class Record:
    """What is logged and counted of one request."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    status: int | None = None
    num_prompt_tokens: int | None = None
    num_emitted: int | None = None

    @classmethod
    def of(cls, scope: Scope) -> Record:
        """The request's own."""
        record: Record = scope[_RECORD_KEY]
        return record

    def attach(self, scope: Scope) -> None:
        """Make `of` find it."""
        scope[_RECORD_KEY] = self


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body. Raises: ApiError 413, 408 or 415.

    A body over the limit is read on and thrown away, up to a multiple of the limit: a client that is still writing when
    the connection closes would never see the answer.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Also keeps web pages out: a browser asks first before it sends this type to another site, and gets no leave.
        raise ApiError(415, "body: send it as Content-Type: application/json")
    body = bytearray()
    num_bytes = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes <= settings.max_body_bytes:
                    body += chunk
                elif num_bytes > _DISCARD_FACTOR * settings.max_body_bytes:
                    break
    except TimeoutError:
        raise _closing(ApiError(408, f"body: did not arrive within {settings.body_timeout_s:g} s")) from None
    if num_bytes > settings.max_body_bytes:
        message = f"body: must be at most {settings.max_body_bytes} bytes"
        raise _closing(ApiError(413, message, code="body_too_large"))
    return bytes(body)


def _closing(error: ApiError) -> ApiError:
    error.headers["Connection"] = "close"
    return error


class Answer(Response):
    """ASGI response: submits jobs, one for each choice, and sends what comes of them, whole or as server-sent events.

    The status waits for the first token, so that a failure before it has its own. A client that leaves, or is dropped
    because it takes nothing, cancels the jobs, and so does one that fails. In the end their ticket is given back.
    """

    def __init__(self, jobs: Sequence[Job], ticket: ExitStack, form: AnswerFormat, worker: DecodeWorker) -> None:
        super().__init__()
        self.jobs, self.ticket = jobs, ticket
        self.form = form
        self.worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: ApiError before anything was sent."""
        record = Record.of(scope)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            for job in self.jobs:
                self.worker.submit(job)
            await (self._send_events(record, send) if self.form.streamed else self._send_whole(record, send))
        except ClientDisconnect:
            record.status = CLIENT_LEFT
        finally:
            watcher.cancel()
            self._cancel()
            self.ticket.close()

    def _cancel(self) -> None:
        for job in self.jobs:
            self.worker.cancel(job)

    async def _watch(self, receive: Receive) -> None:
        """Waits for the client to leave, which nothing else would notice before the next write."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()
        self.jobs[0].events.put_nowait((0, ApiError(CLIENT_LEFT, "the client left")))

    async def _next(self, record: Record) -> tuple[int, Piece | Finished]:
        """An event and its choice's index."""
        event: Event
        index, event = await self.jobs[0].events.get()
        if isinstance(event, ApiError):
            if event.status == CLIENT_LEFT:
                raise ClientDisconnect
            raise event
        if isinstance(event, Finished):
            record.num_prompt_tokens = (record.num_prompt_tokens or 0) + event.stats.num_prompt_tokens
            record.num_emitted = (record.num_emitted or 0) + event.num_emitted
        return index, event

    async def _send_whole(self, record: Record, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self.jobs]
        ends: dict[int, Finished] = {}
        while len(ends) < len(self.jobs):
            index, event = await self._next(record)
            if isinstance(event, Piece):
                pieces[index].append(event)
            else:
                ends[index] = event
        body = self.form.whole(pieces, [ends[index] for index in range(len(ends))])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, record: Record, send: Send) -> None:
        first = await self._next(record)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ends: dict[int, Finished] = {}
        try:
            for index in range(len(self.jobs)):
                await self._send_body(send, *self.form.opening(index))
            index, event = first
            while True:
                if isinstance(event, Piece):
                    await self._send_body(send, *self.form.piece(index, event))
                else:
                    ends[index] = event
                    await self._send_body(send, *self.form.ending(index, event))
                if len(ends) == len(self.jobs):
                    break
                index, event = await self._next(record)
            await self._send_body(send, *self.form.closing([ends[index] for index in range(len(ends))]))
        except ApiError as error:
            # Too late for a status of its own.
            record.status = error.status
            await self._send_body(send, error_event(error.body()))
        await send({"type": "http.response.body", "body": b""})

    async def _send_body(self, send: Send, *events: bytes) -> None:
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
