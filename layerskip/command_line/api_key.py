"""The key that a command's server asks for: from a file or the environment, and a must beyond this machine."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

KEY_VARIABLE = "LAYERSKIP_API_KEY"
MIN_KEY_LENGTH = 16
_MAX_KEY_FILE_BYTES = 4096


def read_api_key(path: Path | None, host: str) -> str | None:
    """From the file or the environment: a command line is there for every user of the machine to see.

    Raises: ValueError, without the key in it; also if there is none and `host` can be reached from other machines.
    """
    if path is not None:
        if not path.is_file():
            raise ValueError(f"--api-key-file: no such file: {path}")
        with path.open("rb") as file:
            key: str | None = file.read(_MAX_KEY_FILE_BYTES).decode("utf-8", "replace").strip()
        if path.stat().st_mode & 0o077:
            sys.stderr.write(f"warning: --api-key-file: others can read {path}; chmod 600 it\n")
    else:
        key = os.environ.get(KEY_VARIABLE)
    if key is not None:
        check_api_key(key)
    elif not is_loopback(host):
        raise ValueError(f"--host: {host} can be reached from other machines, so give --api-key-file or {KEY_VARIABLE}")
    return key


def check_api_key(key: str) -> None:
    """Raises ValueError, without the key in it."""
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"API key: must be at least {MIN_KEY_LENGTH} printable ASCII characters without blanks, got {len(key)} "
            "characters (not shown)"
        )


def is_loopback(host: str) -> bool:
    """Whether this address can be reached from this machine alone. Other names than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
