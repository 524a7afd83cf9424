"""Sets of token ids that drafts choose among, as a config file keeps them: a bit for each id, compressed, as text."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterable
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

MAX_PACKED = 1 << 22
"""Characters of a set, more than of any vocabulary there may be."""
_MOST_BYTES = 1 << 21
_NAME = re.compile(r"[0-9a-f]{8}")


def pack_ids(ids: Iterable[int]) -> str:
    """The inverse of `unpack_ids`."""
    chosen = np.fromiter(ids, dtype=np.int64)
    flags = np.zeros(int(chosen.max()) + 1, dtype=bool)
    flags[chosen] = True
    return base64.b64encode(zlib.compress(np.packbits(flags).tobytes(), 9)).decode()


def unpack_ids(packed: str) -> NDArray[np.int64]:
    """(n,), ascending. Raises: ValueError for text that is no such set."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
    except (ValueError, zlib.error):
        raise ValueError(f"draft_ids: must be a packed set of token ids, got {packed[:40]!r}") from None
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8)))
    if inflate.unconsumed_tail or not len(ids):
        raise ValueError(f"draft_ids: must be a packed set of 1 to {8 * _MOST_BYTES} token ids, got {packed[:40]!r}")
    return ids


def name_of(packed: str) -> str:
    """What masks call the set: a hash of it."""
    return hashlib.sha256(packed.encode()).hexdigest()[:8]


def check_name(name: str) -> str:
    """Raises: ValueError for what cannot be the name of a set."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"draft_ids: a name must be 8 hexadecimal digits, got {name[:40]!r}")
    return name


DraftIds = dict[Annotated[str, AfterValidator(check_name)], Annotated[str, Field(max_length=MAX_PACKED)]]
"""Packed sets by name."""


def check_sets(sets: DraftIds) -> DraftIds:
    """Raises: ValueError for one that cannot be read or is called otherwise."""
    for name, packed in sets.items():
        unpack_ids(packed)
        if name != name_of(packed):
            raise ValueError(f"draft_ids: the set {name} must be called {name_of(packed)}, by its contents")
    return sets
