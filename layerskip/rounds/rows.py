"""Kernels for rows of many logits on a CPU, and for torch's random numbers of which few are wanted."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from layerskip.cpp_library import FLAGS, load_cpp

_SOURCE = Path(__file__).with_name("rows.cpp")


class RowKernels:
    """The compiled library's calls on tensors, which are contiguous and on the CPU.

    They keep Python's lock: a call takes some microseconds, and to wait for the lock again may take longer.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def likeliest(
        self,
        row: torch.Tensor,
        most: int,
        least: float,
        divisor: float = 1.0,
        divided: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(n,) int64, ascending: of a row (V,), float32, divided by `divisor` into `divided` (V,), the possible ids
        that are no smaller than `least`, nor than what at least `most` of them reach. None where any is NaN."""
        ids = torch.empty(len(row), dtype=torch.int64)
        found = self._library.layerskip_likeliest(
            ctypes.c_void_p(row.data_ptr()),
            ctypes.c_long(len(row)),
            ctypes.c_float(divisor),
            ctypes.c_long(most),
            ctypes.c_float(least),
            ctypes.c_void_p(None if divided is None else divided.data_ptr()),
            ctypes.c_void_p(ids.data_ptr()),
        )
        return ids[:found].clone()  # not a view, which would keep room for all

    def leave_only(self, row: torch.Tensor, ids: torch.Tensor) -> None:
        """Of a row (V,), float32, in place."""
        places = (row.data_ptr(), len(row), ids.data_ptr(), len(ids))
        self._library.layerskip_only(*map(ctypes.c_void_p, places))

    def skip(self, state: torch.Tensor, count: int) -> None:
        """Brings the state of a generator, as `get_state` gives it, to where drawing so many numbers does, in place."""
        self._library.layerskip_skip(ctypes.c_void_p(state.data_ptr()), ctypes.c_long(count))

    def uniform(self, state: torch.Tensor, count: int) -> torch.Tensor:
        """(count,) float64: what `uniform_` draws from there."""
        out = torch.empty(count, dtype=torch.float64)
        self._library.layerskip_uniform(
            ctypes.c_void_p(state.data_ptr()), ctypes.c_long(count), ctypes.c_void_p(out.data_ptr())
        )
        return out

    def uniform_at(self, state: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(n,) float64: of these numbers those at places (n,) int64. Cost: a fraction of a nanosecond for each number
        up to the last of them, where the places ascend."""
        out = torch.empty(len(places), dtype=torch.float64)
        arguments = (state.data_ptr(), places.data_ptr(), len(places), out.data_ptr())
        self._library.layerskip_uniform_at(*map(ctypes.c_void_p, arguments))
        return out


@cache
def row_kernels() -> RowKernels | None:
    """None where there is no compiler, or this torch draws otherwise."""
    library = load_cpp(_SOURCE, FLAGS, ctypes.PyDLL)
    if isinstance(library, str):
        return None
    library.layerskip_likeliest.restype = ctypes.c_long
    for name in ("layerskip_only", "layerskip_skip", "layerskip_uniform", "layerskip_uniform_at"):
        getattr(library, name).restype = None
    kernels, generator, count = RowKernels(library), torch.Generator().manual_seed(1), (1 << 12) + 1
    before = generator.get_state()
    drawn = torch.empty(count, dtype=torch.float64).uniform_(generator=generator)
    after = before.clone()
    kernels.skip(after, count)
    is_alike = torch.equal(kernels.uniform(before, count), drawn) and torch.equal(generator.get_state(), after)
    return kernels if is_alike else None
