"""Memory in pages of 2 MiB, for weights that every step reads from end to end.

A virtual machine takes long to find where an ordinary page of 4 KiB lies, and a step reads tens of thousands of them.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

PAGE_BYTES = 2 << 20
ADVICE = mmap.MADV_HUGEPAGE
"""How such pages are asked for."""
_PIECE_BYTES = 64 << 20
_CACHE_LINE = 64


class HugePages:
    """Copies of tensors, side by side; in ordinary pages where there are no others (`transparent_hugepage` is `never`).

    A piece of memory is given back when the last of its tensors is gone.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Contiguous, its beginning at a cache line's."""
        size = tensor.numel() * tensor.itemsize
        if size > len(self._rest):
            self._rest = _piece(max(size, _PIECE_BYTES))
        place, self._rest = self._rest[:size], self._rest[-(-size // _CACHE_LINE) * _CACHE_LINE :]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _piece(size: int) -> torch.Tensor:
    """Bytes of memory that is taken when it is first written to."""
    pages = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that knows of no such pages
        pages.madvise(ADVICE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + size]
