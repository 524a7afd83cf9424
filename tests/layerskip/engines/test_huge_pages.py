"""Weights in large pages: the same numbers, side by side, in memory that is asked for as such pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from layerskip.config.skip_mask import DraftBits
from layerskip.engines.native import huge_pages
from layerskip.engines.native.huge_pages import PAGE_BYTES, HugePages
from layerskip.engines.native.layers import NativeLayers
from tests.layerskip.engines.test_native import needs_kernels

SMAPS = Path("/proc/self/smaps")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's /proc")


def is_asked_for(address: int) -> bool:
    """Whether there is memory there, and such pages were asked for."""
    area = r"^([0-9a-f]+)-([0-9a-f]+) (?:.|\n)*?^VmFlags: (.*)$"
    areas = re.findall(area, SMAPS.read_text(encoding="utf-8"), re.MULTILINE)
    return any("hg" in flags.split() for first, last, flags in areas if int(first, 16) <= address < int(last, 16))


def test_copies_are_the_same_and_lie_side_by_side() -> None:
    memory = HugePages()
    tensors = [torch.randn(3, 5), torch.arange(7, dtype=torch.int8), torch.randn(2, 4, 3).bfloat16(), torch.zeros(0, 4)]
    copies = [memory.copy(one) for one in tensors]
    for own, copy in zip(tensors, copies, strict=True):
        assert torch.equal(own, copy)
        assert (copy.dtype, copy.is_contiguous()) == (own.dtype, True)
    places = [one.data_ptr() for one in copies[:3]]
    assert places[0] % PAGE_BYTES == 0
    assert [place - places[0] for place in places] == [0, 64, 128]
    assert torch.equal(memory.copy(torch.arange(6).view(2, 3).T), torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_a_tensor_larger_than_a_piece_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", 256)
    memory = HugePages()
    sizes = [64, 512, 200, 100]
    copies = [memory.copy(torch.full((size,), place, dtype=torch.uint8)) for place, size in enumerate(sizes)]
    assert [(one.unique().tolist(), len(one)) for one in copies] == [
        ([place], size) for place, size in enumerate(sizes)
    ]
    assert len({one.untyped_storage().data_ptr() for one in copies}) == 4


@needs_smaps
def test_such_pages_are_asked_for_and_given_back_with_the_last_tensor() -> None:
    memory = HugePages()
    first, second = memory.copy(torch.zeros(4)), memory.copy(torch.zeros(4))
    address = second.data_ptr()
    del memory, first
    assert is_asked_for(address)
    assert second.tolist() == [0.0] * 4
    del second
    assert not is_asked_for(address)


def test_a_kernel_without_such_pages_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "ADVICE", -1)  # refused by every kernel
    assert HugePages().copy(torch.arange(4)).tolist() == [0, 1, 2, 3]


@needs_kernels
@needs_smaps
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_packed_weights_lie_there_and_others_where_they_were(bits: DraftBits | None) -> None:
    weight = torch.randn(8, 64)
    packed = NativeLayers(bits=bits).linear([weight], None)
    assert all(is_asked_for(one.data_ptr()) for one in packed.weights)
    held = NativeLayers(in_place=True).linear([weight], None).weights
    assert [one.data_ptr() for one in held] == [weight.data_ptr()]
