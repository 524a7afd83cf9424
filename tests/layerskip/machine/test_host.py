"""Facts of this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
import torch
from layerskip.machine.host import return_large_blocks

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"abcde")]

libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info
if sys.argv[1] == "returned":
    return_large_blocks()
torch.empty(24 << 20, dtype=torch.uint8)  # freed: by itself the library now keeps blocks of this size
before = libc.mallinfo2().hblkhd
block = torch.empty(12 << 20, dtype=torch.uint8)
print(libc.mallinfo2().hblkhd - before >= 12 << 20)
"""


@pytest.mark.parametrize(
    ("how", "apart"), [("returned", "True"), pytest.param("by itself", "False", marks=pytest.mark.slow)]
)
def test_large_blocks_are_kept_apart_from_the_heap_so_that_they_can_be_returned(how: str, apart: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=False)
    if "mallinfo2" in done.stderr or "libc.so.6" in done.stderr:
        pytest.skip("not glibc, or an old one")
    assert done.stdout.split() == [apart], done.stderr
