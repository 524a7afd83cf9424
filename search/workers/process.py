"""The identity of a process, and whether the process it names is gone."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

_GONE = "gone"


def process_token() -> str:
    """This process as `host pid start`, so that a reused pid is not taken for it."""
    return _token(os.getpid())


@lru_cache(maxsize=1)
def _token(pid: int) -> str:
    return f"{platform.node()} {pid} {_start_time(pid)}"


def is_here(token: str) -> bool:
    """Whether it names a process of this host, whose end can be seen at once."""
    return _parts(token)[0] == platform.node()


def is_gone(token: str) -> bool:
    """Whether a process of this host has ended. Tokens that nobody here wrote count as ended."""
    _, pid, start = _parts(token)
    return not pid.isdecimal() or int(pid) == 0 or start != _start_time(int(pid))


def describe_process(token: str) -> str:
    """For people: `process 4711 on gpu-3`, without the host where that is this one."""
    host, pid, _ = _parts(token)
    return f"process {pid}" if host == platform.node() else f"process {pid} on {host}"


def pid_of(token: str) -> int:
    """Its pid; 0 where it names none."""
    pid = _parts(token)[1]
    return int(pid) if pid.isdecimal() else 0


def _parts(token: str) -> tuple[str, str, str]:
    host, pid, start = ["", "", "", *token.rsplit(" ", 2)][-3:]
    return host, pid, start


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the process's start; `alive` where only its existence can be told, `gone` if it is."""
    try:
        # A zombie has ended too: it waits only for its parent to ask.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return _GONE if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return _GONE
    try:
        os.kill(pid, 0)
    except OSError:
        return _GONE
    return "alive"
