"""How much memory can be had: what only keeps files at hand counts, a container's limit too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerskip.huggingface import memory

CPU = torch.device("cpu")
TOLD = "MemTotal:       24000000 kB\nMemFree:          500000 kB\nMemAvailable:   16000000 kB\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In no container."""
    monkeypatch.setattr(memory, "_LINUX", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    (tmp_path / "meminfo").write_text(TOLD)
    return tmp_path


def test_files_at_hand_are_not_in_the_way(machine: Path) -> None:
    assert memory.free_bytes(CPU) == 16_000_000 << 10


def test_a_container_has_what_its_limit_leaves(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{8 << 30}\n")
    (machine / "memory.current").write_text(f"{7 << 30}\n")
    assert memory.free_bytes(CPU) == 1 << 30
    (machine / "memory.stat").write_text(f"anon {3 << 30}\nfile {4 << 30}\ninactive_file {2 << 30}\n")
    assert memory.free_bytes(CPU) == 3 << 30
    (machine / "memory.current").write_text(f"{11 << 30}\n")
    assert memory.free_bytes(CPU) == 0
    (machine / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) == 16_000_000 << 10


def test_a_machine_that_does_not_tell_has_half_of_its_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").unlink()
    monkeypatch.setattr(memory, "machine_bytes", lambda: 6 << 30)
    assert memory.free_bytes(CPU) == 3 << 30
    monkeypatch.setattr(memory, "machine_bytes", lambda: None)
    assert memory.free_bytes(CPU) == 0


def test_a_copy_may_take_half_of_it(machine: Path) -> None:
    assert memory.lack_of_room(8_000_000 << 10, CPU) == ""
    assert memory.lack_of_room((8_000_000 << 10) + 1, CPU) == "7812 MiB, and 15625 MiB are free"
