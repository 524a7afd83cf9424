"""A page, or one part of it, as a PNG."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Error, Page, sync_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_MS_TO_DRAW = 120_000
_MS_TO_SETTLE = 2_000
_PLOT = ".main-svg"
"""What Plotly draws into."""


@contextmanager
def tab_of(width: int, height: int) -> Iterator[Page]:
    """An empty page of a headless browser.

    Raises: FileNotFoundError without a browser, RuntimeError in one line for what goes wrong in it.
    """
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError(f"no browser: one of {', '.join(_BROWSERS)} is needed")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        try:
            launched = playwright.chromium.launch(executable_path=browser, args=arguments, timeout=_MS_TO_DRAW)
        except Error as error:
            raise RuntimeError(f"{browser}: does not start: {str(error).splitlines()[0]}") from error
        try:
            tab = launched.new_page(viewport={"width": width, "height": height})
            tab.set_default_timeout(_MS_TO_DRAW)
            yield tab
        except Error as error:
            raise RuntimeError(f"{browser}: wrote no picture: {str(error).splitlines()[0]}") from error
        finally:
            launched.close()


def take_picture(
    page: Path | str,
    picture: Path,
    width: int,
    height: int,
    part: str | None = None,
    prepare: Callable[[Page], None] | None = None,
) -> None:
    """Open a file or an address in a headless browser and write a PNG once the last of Plotly's figures is drawn.

    Of the top of the page, so many pixels, or of the first element that the CSS selector `part` finds, all of it.
    `prepare` may scroll or click then.
    Raises: FileNotFoundError without a page or a browser, RuntimeError if it shows no such part.
    """
    with tab_of(width, height) as tab:
        tab.goto(address_of(page), wait_until="commit")
        tab.locator(_PLOT).last.wait_for()
        if prepare is not None:
            prepare(tab)
        tab.wait_for_timeout(_MS_TO_SETTLE)
        if part is None:
            tab.screenshot(path=picture)
        else:
            tab.locator(part).first.screenshot(path=picture)


def address_of(page: Path | str) -> str:
    """Of a file; an address as it is. Raises: FileNotFoundError."""
    if isinstance(page, str) and "://" in page:
        return page
    if not Path(page).is_file():
        raise FileNotFoundError(f"{page}: no such page")
    return Path(page).resolve().as_uri()
