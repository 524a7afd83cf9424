"""The repository stays small enough to be carried to a machine without network: a GPU lent for half an hour, say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 30 << 20
MAX_FILE_BYTES = 3_000_000
LARGE = {"studies/demo/model/model.safetensors"}
"""What `make search` searches without a download."""


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Bytes of every tracked file, by name."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git checkout: which files are tracked is not known")
    names = [name for name in listed.split("\0") if (ROOT / name).is_file()]
    if "pyproject.toml" not in names:
        pytest.skip("a copy inside another git checkout: its own files are not tracked")
    return {name: (ROOT / name).stat().st_size for name in names}


def test_tracked_files_together_are_small(sizes: dict[str, int]) -> None:
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    total = sum(sizes.values())
    assert total < MAX_BYTES, f"{total / (1 << 20):.1f} MiB, the largest: {', '.join(largest)}"


def test_no_tracked_file_but_the_demo_model_is_large(sizes: dict[str, int]) -> None:
    """Raw measurements are kept as what results are computed from, under xz: see `search.compact`."""
    assert {name for name, size in sizes.items() if size > MAX_FILE_BYTES} == LARGE
