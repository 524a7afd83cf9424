"""optuna-dashboard in a real browser: the study's page shows our figures, note and files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from search.dashboard import open_app
from search.reporting.dashboard_page import FIGURES
from tests.browser.conftest import Visit
from tests.search.helpers.servers import serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@contextmanager
def page_of(study: Path) -> Iterator[str]:
    """The study's page, served on loopback."""
    app, page, _ = open_app(str(study), None)
    with serving(app) as address:
        yield f"{address}/{page}"


@pytest.fixture
def address(winning_study: Path) -> Iterator[str]:
    with page_of(winning_study) as one:
        yield one


def test_the_studys_page_shows_our_figures_and_files(visit: Visit, address: str) -> None:
    visit.page.goto(address, wait_until="commit")
    for name in FIGURES:
        plot = visit.page.locator(f"[id='user-defined-plot:{name}']")
        plot.locator(".main-svg").first.wait_for()
        assert plot.locator(".cartesianlayer :is(.point, .js-line, image)").count() > 0, name
    visit.page.get_by_text("report.html").first.wait_for()
    visit.page.get_by_text("best.json").first.wait_for()
    assert visit.complaints == []


def test_a_study_that_is_an_archive_alone_is_shown(visit: Visit, winning_study: Path, tmp_path: Path) -> None:
    """As in a fresh clone, where nothing has been run."""
    clone = tmp_path / winning_study.name
    clone.mkdir()
    for name in ("study.toml", "study.jsonl.xz"):
        shutil.copy(winning_study / name, clone)
    with page_of(clone) as address:
        visit.page.goto(address, wait_until="commit")
        for name in FIGURES:
            visit.page.locator(f"[id='user-defined-plot:{name}'] .main-svg").first.wait_for()
        assert visit.complaints == []


def test_the_note_tells_the_verdict_and_the_command(visit: Visit, address: str, winning_study: Path) -> None:
    confirmed = json.loads((winning_study / "best.json").read_text(encoding="utf-8"))["confirmed"]
    visit.page.goto(f"{address}/note", wait_until="commit")
    visit.page.get_by_text("times as fast as plain decoding").first.wait_for()
    text = visit.page.locator("body").inner_text()
    assert f"Speculate: {confirmed['speedup']:.2f} times as fast" in text
    assert "python -m search.run" in text
