"""A test that breaks the device's context is reported, and the tests after it run on a sound one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import sys, types
import pytest

state = {"broken": False}

def use():
    if state["broken"]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=use)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
pytestmark = pytest.mark.gpu

def test_before():
    use()

def test_breaks():
    state["broken"] = True
    assert False, "the reason"

def test_after():
    use()

def test_fails_and_breaks_nothing():
    assert False, "another"

def test_last():
    use()
"""


def test_the_tests_after_a_broken_context_run_all_the_same(tmp_path: Path) -> None:
    # In one process, all tests after such a one failed with its error.
    (tmp_path / "test_device.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "tests.lost_device", "-p", "no:cacheprovider", "-rA"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outside, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    for name in ("test_before", "test_after", "test_last"):
        assert f"PASSED test_device.py::{name}" in done.stdout, done.stdout
    assert "AssertionError: the reason" in done.stdout
    assert "crashed while running 'test_device.py::test_breaks'" in done.stdout
    assert "FAILED test_device.py::test_fails_and_breaks_nothing" in done.stdout
