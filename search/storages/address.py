"""Storage URLs: what they point to, and how they are shown without a password."""

from __future__ import annotations

import os
import re
from pathlib import Path

SQLITE = "sqlite:///"
JOURNAL = "journal:"
GRPC = "grpc://"
STORAGE_VARIABLE = "LAYERSKIP_STORAGE"
"""Of the environment: the storage of commands that are not told another. A command line is there for every user of the
machine to see, with the password in it."""
FROM_ENVIRONMENT = f"${STORAGE_VARIABLE}"
"""What stands in a study.toml for a storage whose address holds a password and came from the environment."""
STORAGE_HELP = f"Optuna storage, if it is not the study's own; or set {STORAGE_VARIABLE}"
"""Of the flag in every command that reads a study."""
_IN_MEMORY = re.compile(r"sqlite(\+\w+)?:/{2,3}(:memory:|file::memory:)?(\?.*)?")
_SECRET = re.compile("pass|pwd|secret|token|key", re.IGNORECASE)


def storage_file(url: str) -> Path | None:
    """The file behind an SQLite or journal storage; None for servers."""
    for prefix in (SQLITE, JOURNAL):
        if url.startswith(prefix):
            return Path(url.removeprefix(prefix).partition("?")[0])
    return None


def is_in_memory(url: str) -> bool:
    """Whether it is SQLite without a file."""
    return _IN_MEMORY.fullmatch(url) is not None


def storage_argument(given: str | None) -> str | None:
    """What --storage says, else the environment."""
    return given or os.environ.get(STORAGE_VARIABLE) or None


def redact(url: str) -> str:
    """The URL for terminals and files: without its password, a path below the working directory relative to it."""
    file = storage_file(url)
    if file is not None:
        return url.replace(str(file), near(file), 1)
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    # A password may hold "/" and "?" (SQLAlchemy ends it at "@" alone), so the account ends at the last "@".
    account, at, tail = rest.rpartition("@")
    if at and ":" in account:
        account = account.partition(":")[0] + ":***"
    path, question, query = tail.partition("?")
    pairs = [
        f"{name}=***" if _SECRET.search(name) else f"{name}{equals}{value}"
        for name, equals, value in (pair.partition("=") for pair in query.split("&"))
    ]
    return f"{scheme}{mark}{account}{at}{path}{question}{'&'.join(pairs) if question else ''}"


def holds_secret(url: str) -> bool:
    """Whether the URL is one not to show as it is."""
    return storage_file(url) is None and redact(url) != url


def near(path: Path) -> str:
    """The path as a person would type it here: relative where it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
