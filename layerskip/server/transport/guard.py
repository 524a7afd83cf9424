"""Guard: what every request passes: whose Host and key it brings, and what is counted and logged of it."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layerskip.server.errors import ApiError, too_many_connections
from layerskip.server.metrics import ServerMetrics
from layerskip.server.settings import ServerSettings
from layerskip.server.transport.transport import CLIENT_LEFT, Record

access_logger = logging.getLogger("layerskip.server.access")

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key: orchestrators ask here, and learn nothing."""
_KNOWN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"})


class Guard:
    """ASGI middleware. Logs neither prompts nor keys nor query strings."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics, num_connections: Callable[[], int]
    ) -> None:
        self._app = app
        self._num_connections = num_connections
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(secrets.token_hex(8))
        record.attach(scope)

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            refusal = self._refusal(scope)
            answer = self._app if refusal is None else error_response(refusal)
            await answer(scope, receive, send_recorded)
        except Exception:
            record.status = 500  # answered, and logged, by the framework around this
            raise
        finally:
            self._finish(scope, record)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, key = Headers(scope=scope), self._settings.api_key
        if self._settings.hosts is not None and _host_name(headers.get("host", "")) not in self._settings.hosts:
            return ApiError(421, "host: this server answers to names of this machine only", code="unknown_host")
        if scope["path"] in OPEN_PATHS:
            return None
        if self._num_connections() > self._settings.max_connections:
            return too_many_connections(self._settings.max_connections)
        if key is None:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # In constant time, so that nobody can guess the key byte by byte; as bytes, or it refuses all but ASCII.
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8"), key.encode("utf-8")):
            return None
        message = "missing API key: send Authorization: Bearer KEY" if not given else "wrong API key"
        error = ApiError(401, message, code="invalid_api_key")
        error.headers["WWW-Authenticate"] = "Bearer"
        return error

    def _finish(self, scope: Scope, record: Record) -> None:
        seconds = time.monotonic() - record.started_s
        status = CLIENT_LEFT if record.status is None else record.status
        path = scope["path"]
        # Any other path would become a label of its own, for as long as the server runs.
        known = path if path in _KNOWN_PATHS else "/v1/models/" if path.startswith("/v1/models/") else "other"
        self._metrics.count_request(known, status, seconds)
        if self._settings.access_log:
            tokens = "" if record.num_prompt_tokens is None else f" {record.num_prompt_tokens} prompt tokens"
            tokens += "" if record.num_emitted is None else f" {record.num_emitted} emitted"
            # ascii(): a path may hold line breaks, which would forge lines of this log.
            access_logger.info(
                "%s %s %s %d %.3f s%s", record.request_id, scope["method"], ascii(path[:80]), status, seconds, tokens
            )


def error_response(error: ApiError) -> JSONResponse:
    """OpenAI's error object with its status."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def _host_name(host: str) -> str:
    """`localhost:8000` -> `localhost`, `[::1]:8000` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
