"""What `make test-minimum` runs: every test function that its markers admit, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_many(n): pass

def test_one(): pass

@pytest.mark.slow
def test_slow(): pass
"""


@pytest.mark.slow
def test_of_a_parametrised_test_the_first_case_that_the_markers_admit_is_run(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "--collect-only"]
    flags = ["-m", "not slow", "-p", "no:cacheprovider", str(file)]
    found = []
    for more in ([], ["--first-cases"]):
        run = subprocess.run([*command, *flags, *more], cwd=ROOT, capture_output=True, text=True, check=True)
        found.append([line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line])
    assert found == [["test_many[2]", "test_many[3]", "test_one"], ["test_many[2]", "test_one"]]
