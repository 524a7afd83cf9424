"""grpc://HOST:PORT: Optuna's storage proxy, so that many workers share a few connections to the database."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import optuna
from optuna.storages import GrpcStorageProxy

from layerskip.command_line.api_key import read_api_key
from search.storages.address import GRPC, redact
from search.storages.errors import ConnectionLost
from search.storages.patient import PatientStorage, RetryPolicy

if TYPE_CHECKING:
    import grpc

DEFAULT_PORT = 13000
MAX_MESSAGE_BYTES = 256 << 20
"""A study's attributes and all its trials pass in one message each."""
KEEPALIVE_MS = 30_000
KEY_HEADER = "authorization"
_CONNECT_TIMEOUT_S = 5
_NO_STUDY = "layerskip/nobody has a study of this name"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A proxy that comes back is found soon; the default pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
)


def open_proxy(url: str, policy: RetryPolicy | None = None) -> PatientStorage:
    """The storage behind a proxy that answers now; one that restarts later is waited for.

    Raises: ValueError, ConnectionError or ImportError.
    """
    probe(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # no change since 4.2
        return PatientStorage(_Proxy(url), redact(url), policy, judge=_judge)


def probe(url: str) -> None:
    """Ask for a study that does not exist, so that a wrong server and a wrong key show at once.

    Raises: ValueError for a URL of another form; ConnectionError if nobody answers; ImportError without grpcio.
    """
    _address(url)
    grpc = _grpc()
    from optuna.storages._grpc.auto_generated import api_pb2

    with _channel(url) as channel:
        stub = _stub(channel)
        try:
            stub.GetStudyIdFromName(
                api_pb2.GetStudyIdFromNameRequest(study_name=_NO_STUDY), timeout=_CONNECT_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return
            raise ConnectionError(_said(error)) from None


class _Proxy(GrpcStorageProxy):
    """With our channel: a key if there is one, bounded messages, quick reconnection."""

    def __init__(self, url: str) -> None:
        self._url = url
        host, port = _address(url)
        super().__init__(host=host, port=port)

    def _setup(self) -> None:
        from optuna.storages._grpc.client import GrpcClientCache

        self._channel = _channel(self._url)
        self._stub = _stub(self._channel)
        self._cache = GrpcClientCache(self._stub)


def _stub(channel: grpc.Channel) -> Any:
    from optuna.storages._grpc.auto_generated import api_pb2_grpc

    make: Any = api_pb2_grpc.StorageServiceStub  # generated code has no types
    return make(channel)


def _channel(url: str) -> grpc.Channel:
    grpc = _grpc()
    host, port = _address(url)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    channel = grpc.insecure_channel(where, options=_OPTIONS)
    key = read_api_key(None, "localhost")
    return channel if key is None else grpc.intercept_channel(channel, _bearer(key))


def _bearer(key: str) -> Any:
    grpc = _grpc()

    class Bearer(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc, name-defined]  # the library has no types
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            metadata = [*(details.metadata or ()), (KEY_HEADER, f"Bearer {key}")]
            return continuation(details._replace(metadata=metadata), request)

    return Bearer()


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        parts, port = urlsplit(GRPC), 0
    if not parts.hostname or not port or "@" in url or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("must have the form grpc://HOST:PORT, and nothing more")
    return parts.hostname, port


def _judge(error: Exception) -> Exception:
    """ConnectionLost if the proxy is gone; what the proxy itself could not do, in one line."""
    grpc = _grpc()
    if not isinstance(error, grpc.RpcError):
        return error
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ConnectionLost(_said(error))
    return optuna.exceptions.StorageInternalError(_said(error))


def _said(error: Any) -> str:
    """gRPC's details without its own decoration."""
    grpc = _grpc()
    details = str(error.details() or "").removeprefix("Exception calling application: ").strip()
    said = {
        grpc.StatusCode.DEADLINE_EXCEEDED: f"nobody answers within {_CONNECT_TIMEOUT_S} s",
        grpc.StatusCode.UNIMPLEMENTED: "the server there is not Optuna's storage proxy",
    }.get(error.code(), details.partition("\n")[0])
    return f"storage proxy: {said or error.code().name}"


def _grpc() -> Any:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the library's own lines on stderr; errors are ours to tell
    try:
        import grpc
    except ImportError:
        raise ImportError("needs grpcio and protobuf: pip install 'layerskip[grpc]'") from None
    return grpc
