"""Lets the tests import `studies.demo`, which is no installed package."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.search.helpers.servers import postgres_server

__all__ = ["postgres_server"]  # a fixture

sys.path.append(str(Path(__file__).resolve().parents[2]))
