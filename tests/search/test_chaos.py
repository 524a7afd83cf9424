"""Workers killed at random moments: no trial is lost, none counted twice, none left running."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.search.chaos import audit, kill_at_random
from tests.search.helpers.crew_member import Order

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("CHAOS_KILLS", "6"))
"""CHAOS_KILLS=50 is the long form."""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_nothing_is_lost_where_workers_are_killed(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    is_file = kind == "sqlite"
    storage = f"sqlite:///{tmp_path / 'study.db'}" if is_file else request.getfixturevalue("postgres_url")
    order = Order(tmp_path, storage, study_name=tmp_path.name, trials=KILLS + 14)
    kill_at_random(order, kills=KILLS, num_workers=3, seed=KILLS)
    assert audit(order)["died"] > 0
