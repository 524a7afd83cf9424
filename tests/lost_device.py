"""A GPU test that breaks the device's context ends its worker alone: a plugin of pytest."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

LOST = 3
"""The worker's exit code."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Every later call to a broken context fails too, until the process ends: pytest-xdist then starts another worker,
    which goes on with the next test. The test's own failure has been told before. Without workers nothing is done, and
    the tests after it are reported as failed with it."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker("gpu") is not None and not _device_answers():
        os._exit(LOST)


def _device_answers() -> bool:
    torch = sys.modules["torch"]
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
