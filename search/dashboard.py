"""python -m search.dashboard: browse a study in optuna-dashboard, on this machine only."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from layerskip.command_line.api_key import KEY_VARIABLE, read_api_key
from layerskip.command_line.cli import OneLineParser, run_command
from search.command_line import demo_folder
from search.dashboard_guard import DashboardGuard
from search.reporting.source import Address, open_source
from search.storages.address import STORAGE_HELP, near, storage_argument

PROG = "search.dashboard"


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(
        prog=f"python -m {PROG}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", help="study folder, or its study.toml; default: the demo study")
    parser.add_argument("--storage", help=STORAGE_HELP)
    parser.add_argument("--port", type=int, default=8080, help="default 8080; 0 = any free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="default 127.0.0.1; any other than this machine's own needs a key"
    )
    parser.add_argument(
        "--api-key-file", type=Path, help=f"file with the key that browsers give as password; or set {KEY_VARIABLE}"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


class OpenApp(NamedTuple):
    """The dashboard on one storage."""

    app: Callable[..., Any]
    """WSGI."""
    page: str
    """The address of the study's page in it."""
    archive: Path | None
    """What the study was read from, if not from its storage: changes are not kept."""


def open_app(study: str | None, storage_url: str | None) -> OpenApp:
    """The dashboard on a study's storage, or on its archive.

    Opens an existing study only; never creates a database.
    Raises: ValueError or FileNotFoundError in one line.
    """
    from optuna.artifacts import FileSystemArtifactStore

    source = open_source(Address(study, storage_url), demo=demo_folder())
    study_id = source.storage.get_study_id_from_name(source.name)
    files = source.paths.artifacts
    store = FileSystemArtifactStore(files) if files.is_dir() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dashboard's dependencies warn of their own future
        from optuna_dashboard import wsgi

        return OpenApp(wsgi(source.storage, store), f"dashboard/studies/{study_id}", source.archive)


def bind(app: Callable[..., Any], host: str, port: int) -> WSGIServer:
    """A server bound to the address, not yet serving. Raises: OSError in one line if the port is taken."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port: must be in 0..65535, got {port}")
    try:
        return make_server(host, port, app, server_class=_Server, handler_class=_QuietHandler)
    except OSError as error:
        raise OSError(f"cannot serve on {host}:{port}: {error.strerror or error}; try another --port") from None


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per request: a browser's idle connection, or a large study being sent, holds up nobody else."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """No line per request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _run(arguments: argparse.Namespace) -> int:
    key = read_api_key(arguments.api_key_file, arguments.host)
    opened = open_app(arguments.study, storage_argument(arguments.storage))
    with bind(DashboardGuard(opened.app, key, arguments.host), arguments.host, arguments.port) as server:
        sys.stdout.write(f"http://{arguments.host}:{server.server_port}/{opened.page}\nCtrl-C ends it.\n")
        if opened.archive is not None:
            sys.stdout.write(f"Read from {near(opened.archive)}: what is changed in the dashboard is not kept.\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
