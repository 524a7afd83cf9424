"""What a request can be refused with: a status, and OpenAI's error object."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Ends a request with `status` and a message that the client may read."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": _error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def queue_full(queue_limit: int, retry_after_s: int) -> ApiError:
    """As many requests wait as may."""
    message = f"the model is busy and {queue_limit} requests wait already, try again"
    error = ApiError(429, message, code="queue_full")
    error.headers["Retry-After"] = str(retry_after_s)
    return error


def too_many_connections(max_connections: int) -> ApiError:
    """More clients than the server takes have a connection open."""
    error = ApiError(503, f"more than {max_connections} connections are open, try again", code="too_many_connections")
    error.headers |= {"Retry-After": "1", "Connection": "close"}
    return error


def shutting_down() -> ApiError:
    """The server is about to end."""
    error = ApiError(503, "the server is shutting down", code="shutting_down")
    error.headers["Connection"] = "close"
    return error


def model_failed() -> ApiError:
    """What a client sees of an exception in the model; the server's log has the rest."""
    return ApiError(500, "the model failed on this request; the server's log says why", code="model_failed")


def _error_type(status: int) -> str:
    by_status = {401: "authentication_error", 429: "rate_limit_error"}
    return by_status.get(status, "server_error" if status >= 500 else "invalid_request_error")
