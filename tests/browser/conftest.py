"""Fixtures of the browser tests: headless Chromium, and two finished studies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from search import run
from tests.search.conftest import save_tiny_model, tiny_flags
from tests.search.helpers.fakes import Bench

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
PATIENCE_MS = 180_000
"""A loaded machine takes its time; a test waits for what it needs and asserts no duration."""


@pytest.fixture(scope="module")  # while it lives an event loop runs in this thread, and other tests want their own
def browser() -> Iterator[Browser]:
    executable = next((found for name in NAMES if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=PATIENCE_MS
        )
        yield launched
        launched.close()


class Visit:
    """A page, and what went wrong while it was shown."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    with visiting(browser) as one:
        yield one


@contextmanager
def visiting(browser: Browser, width: int = 1280) -> Iterator[Visit]:
    """A blank page of this width in a profile of its own."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    yield Visit(context.new_page())
    context.close()


@pytest.fixture(scope="session")
def real_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished search on a tiny random model, decoded and timed for real; it may well end with plain decoding."""
    folder = tmp_path_factory.mktemp("real")
    flags = [*tiny_flags(save_tiny_model(folder / "model"), folder), "--drafters", "layer_skip"]
    assert run.main(flags) == 0
    return folder / "study"


@pytest.fixture(scope="session")
def winning_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished search on fakes that ends with a config to export."""
    bench = Bench(tmp_path_factory.mktemp("winning"), in_sqlite=True)
    assert bench.run(trials=16) == 0
    (bench.folder / "study.toml").write_text('model = "fake"\nprompts = "./p.jsonl"\n', encoding="utf-8")
    return bench.folder


@pytest.fixture(scope="session", params=["real_study", "winning_study"])
def study(request: pytest.FixtureRequest) -> Path:
    """Either of them."""
    folder: Path = request.getfixturevalue(request.param)
    return folder
