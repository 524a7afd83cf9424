"""Facts of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layerskip.machine import host

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


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("files", "limit", "threads"),
    [
        ({}, None, 4),
        ({"cpu.max": "max 100000"}, None, 4),
        ({"cpu.max": "250000 100000"}, 2.5, 2),
        ({"cpu.max": "50000 100000"}, 0.5, 1),
        ({"cpu.max": "800000 100000"}, 8.0, 4),
        ({"cpu.max": "what"}, None, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0, 3),
    ],
)
def test_no_more_threads_than_a_container_may_keep_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: float | None, threads: int
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n", encoding="ascii")
    monkeypatch.setattr(host, "_GROUP", tmp_path)
    assert host.cpu_limit() == limit
    host.keep_to_cpu_limit()
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("four_threads")
def test_threads_that_the_environment_fixes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000", encoding="ascii")
    monkeypatch.setattr(host, "_GROUP", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    host.keep_to_cpu_limit()
    assert torch.get_num_threads() == 4
