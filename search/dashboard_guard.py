"""DashboardGuard: who may use the dashboard: bearers of the key, or without one browsers of this machine alone."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable, Iterable
from typing import Any

_Start = Callable[..., Any]
_App = Callable[[dict[str, Any], _Start], Iterable[bytes]]


class DashboardGuard:
    """WSGI middleware around the dashboard, which has no password of its own and lets anyone delete.

    With a key: HTTP Basic, any name, the key as password. Without: only requests whose Host is a name of this machine,
    which keeps out web pages whose own name was made to point here (DNS rebinding).
    """

    def __init__(self, app: _App, key: str | None, host: str) -> None:
        self._app = app
        self._key = key
        self._hosts = {"localhost", "127.0.0.1", "::1", host.lower()}

    def __call__(self, environ: dict[str, Any], start_response: _Start) -> Iterable[bytes]:
        """See the class."""
        if self._key is not None:
            if not self._is_bearer(environ.get("HTTP_AUTHORIZATION", ""), self._key):
                challenge = ("WWW-Authenticate", 'Basic realm="dashboard", charset="UTF-8"')
                return _refuse(start_response, "401 Unauthorized", "the password is the key", challenge)
        elif _host_name(environ.get("HTTP_HOST", "")) not in self._hosts:
            return _refuse(start_response, "421 Misdirected Request", "this dashboard answers to this machine only")
        return self._app(environ, start_response)

    @staticmethod
    def _is_bearer(header: str, key: str) -> bool:
        scheme, _, encoded = header.partition(" ")
        try:
            password = base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return False
        # In constant time, so that nobody can guess the key byte by byte.
        return scheme.lower() == "basic" and hmac.compare_digest(password, key.encode())


def _refuse(start_response: _Start, status: str, text: str, *headers: tuple[str, str]) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [text.encode() + b"\n"]


def _host_name(host: str) -> str:
    """`localhost:8080` -> `localhost`, `[::1]:8080` -> `::1`."""
    return (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower()
