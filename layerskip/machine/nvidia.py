"""What the driver tells of NVIDIA GPUs, through nvidia-smi; nothing where there is none, or where it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

_TIMEOUT_S = 10.0
_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
"""What is asked of each GPU, and what nvidia-smi calls it."""
_TEXTS = ("name", "driver")
"""Those that are no numbers."""


def nvidia_smi(query: str, fields: Sequence[str]) -> list[list[str]]:
    """Rows of text of `nvidia-smi --query-QUERY=FIELDS`. Cost: a process, hundredths of a second to some seconds."""
    command = ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def unit_name(text: str) -> str:
    """A GPU's id as both the driver and torch are read here: the one puts `GPU-` before it."""
    return text.removeprefix("GPU-")


def gpu_states(units: Sequence[str]) -> list[dict[str, str | float]]:
    """What the driver tells of the GPUs of these ids (see `unit_name`), in their order: of each its fields by name, and
    not those that it does not tell. GPUs that it does not know are left out."""
    if not units:
        return []
    found = {
        unit_name(unit): dict(zip(_FIELDS, cells, strict=True))
        for unit, *cells in nvidia_smi("gpu", ["uuid", *_FIELDS.values()])
    }
    return [_told(found[unit]) for unit in map(unit_name, units) if unit in found]


def _told(cells: dict[str, str]) -> dict[str, str | float]:
    values = {name: _text(cell) if name in _TEXTS else _number(cell) for name, cell in cells.items()}
    return {name: value for name, value in values.items() if value is not None}


def _text(cell: str) -> str | None:
    """None for `[N/A]`, `[Not Supported]`, `[Unknown Error]` and the like."""
    return None if not cell or cell.startswith("[") else cell


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
