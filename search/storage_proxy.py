"""python -m search.storage_proxy: stand between many workers and one database, so that it sees few connections."""

from __future__ import annotations

import argparse
import hmac
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from layerskip.command_line.api_key import KEY_VARIABLE, read_api_key
from layerskip.command_line.cli import CommandError, OneLineParser, run_command
from search.stop import handled_by
from search.storages.address import GRPC, STORAGE_VARIABLE, redact, storage_argument, storage_file
from search.storages.opening import check_storage, storage_at
from search.storages.proxy_client import DEFAULT_PORT, KEEPALIVE_MS, KEY_HEADER, MAX_MESSAGE_BYTES

PROG = "search.storage_proxy"
_MAX_THREADS = 15
"""As many connections as the pool to the database gives out."""
_GRACE_S = 10
"""For calls in progress once the proxy is told to end."""
_LOOK_S = 0.5
_EPILOG = f"""\
Workers then use --storage grpc://HOST:PORT, and send the key that they find in {KEY_VARIABLE}. Nothing on the
way is encrypted, neither the study nor the key: on a network that is not yours alone, use a tunnel."""


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__, epilog=_EPILOG)
    parser.add_argument(
        "--storage",
        default=None,
        metavar="URL",
        help=f"the database server, such as postgresql+psycopg://USER@HOST/NAME; or set {STORAGE_VARIABLE}",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; 0 = any free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="default 127.0.0.1; any other than this machine's own needs a key"
    )
    parser.add_argument("--api-key-file", type=Path, help=f"file with the key that workers send; or set {KEY_VARIABLE}")
    parser.add_argument("--threads", type=int, default=10, help="calls answered at once, and connections; default 10")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 also when it is ended by Ctrl-C or SIGTERM."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    url = storage_argument(arguments.storage)
    if not url:
        raise ValueError(f"--storage: is required, or {STORAGE_VARIABLE} in the environment")
    if storage_file(url) is not None or url.startswith(GRPC):
        raise ValueError(f"--storage: must be the URL of a database server, got {redact(url)}")
    if not 0 <= arguments.port <= 65535:
        raise ValueError(f"--port: must be in 0..65535, got {arguments.port}")
    if not 1 <= arguments.threads <= _MAX_THREADS:
        raise ValueError(f"--threads: must be in 1..{_MAX_THREADS}, got {arguments.threads}")
    key = read_api_key(arguments.api_key_file, arguments.host)
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no line per study
    check_storage(url)
    ended = threading.Event()
    with storage_at(url) as storage, handled_by(lambda *_: ended.set(), (signal.SIGINT, signal.SIGTERM)):
        server, port = start_server(storage, arguments.host, arguments.port, key, num_threads=arguments.threads)
        _tell(arguments.host, port, url)
        while not ended.wait(_LOOK_S):
            pass  # a signal that a thread of gRPC gets is handled here once this thread wakes
        server.stop(_GRACE_S).wait()
    return 0


def start_server(
    storage: BaseStorage, host: str, port: int, key: str | None, *, num_threads: int = 10
) -> tuple[Any, int]:
    """A gRPC server that is serving, and its port. Raises: OSError in one line if the address cannot be had."""
    try:
        import grpc
        from optuna.storages._grpc.auto_generated import api_pb2_grpc
        from optuna.storages._grpc.servicer import OptunaStorageProxyService
    except ImportError:
        raise CommandError("needs grpcio and protobuf: pip install 'layerskip[grpc]'") from None

    server = grpc.server(
        ThreadPoolExecutor(max_workers=num_threads),
        interceptors=() if key is None else (_guard(key),),
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # else two proxies share a port, and nobody is told
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ),
    )
    add: Any = api_pb2_grpc.add_StorageServiceServicer_to_server  # generated code has no types
    add(OptunaStorageProxyService(storage), server)
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise OSError(f"cannot serve on {host}:{port}: taken, or not an address of this machine; try another --port")
    server.start()
    return server, bound


def _guard(key: str) -> Any:
    import grpc

    def refuse(_request: Any, context: Any) -> None:
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED, f"the key is missing or wrong; workers read it from {KEY_VARIABLE}"
        )

    class Guard(grpc.ServerInterceptor):  # type: ignore[misc]  # the library has no types
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            given = dict(details.invocation_metadata).get(KEY_HEADER, "")
            # In constant time, so that nobody can guess the key byte by byte.
            known = hmac.compare_digest(given.encode(), f"Bearer {key}".encode())
            return continuation(details) if known else grpc.unary_unary_rpc_method_handler(refuse)

    return Guard()


def _tell(host: str, port: int, url: str) -> None:
    from layerskip.command_line.api_key import is_loopback

    where = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"{GRPC}{where}:{port} in front of {redact(url)}\nCtrl-C or SIGTERM ends it.\n")
    sys.stdout.flush()
    if not is_loopback(host):
        sys.stderr.write(
            f"warning: --host: {host} can be reached from other machines, and nothing on the way is encrypted\n"
        )


if __name__ == "__main__":
    raise SystemExit(main())
