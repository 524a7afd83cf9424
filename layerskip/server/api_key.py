"""The key that a command's server asks for: from a file or the environment, and a must beyond this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from layerskip.server.settings import check_api_key, is_loopback

KEY_VARIABLE = "LAYERSKIP_API_KEY"
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
