"""Compact files: JSON lines under xz, small enough for a repository to keep what figures are computed from."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import write_atomically
from layerskip.config.strict_json import parse_json

MAX_BYTES = 1 << 28
"""Of text, unpacked: far more than 18,000 trials take, far less than a small malicious file could unpack to."""


def write_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """A line per record, compressed. Cost: a second or two per megabyte of text. Raises: as `write_atomically`."""
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    write_atomically(file, lzma.compress(text.encode(), preset=6 | lzma.PRESET_EXTREME))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The inverse. Raises: OSError; ValueError naming the file, and the line where one is no JSON object."""
    try:
        with lzma.open(file) as packed:
            data = packed.read(MAX_BYTES + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{file}: not a whole xz file: {error}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{file}: must be at most {MAX_BYTES} bytes unpacked")
    return parse_lines(data, file)


def parse_lines(data: bytes, file: Path) -> list[dict[str, Any]]:
    """The JSON objects, one a line. Raises: ValueError naming file and line for anything else."""
    records = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            record = parse_json(line.decode())
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{file}: line {number} is not a JSON object")
        records.append(record)
    return records
