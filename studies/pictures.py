"""python -m studies.pictures PAGE PICTURE.png: what a browser shows of a page, or of one part of it, for the README."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Error, sync_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_MS_TO_DRAW = 120_000
_MS_TO_SETTLE = 2_000


def take_picture(page: Path | str, picture: Path, width: int, height: int, part: str | None = None) -> None:
    """Open a file or an address with Plotly figures in a headless browser and write a PNG.

    Of the top of the page, so many pixels, or of the first element that the CSS selector `part` finds, all of it.
    Raises: FileNotFoundError without a page or a browser, RuntimeError if it shows no such part.
    """
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError(f"no browser: one of {', '.join(_BROWSERS)} is needed")
    address = str(page)
    if "://" not in address:
        if not Path(page).is_file():
            raise FileNotFoundError(f"{page}: no such page")
        address = Path(page).resolve().as_uri()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        try:
            tab = launched.new_page(viewport={"width": width, "height": height})
            tab.set_default_timeout(_MS_TO_DRAW)
            tab.goto(address, wait_until="commit")
            tab.locator(".main-svg").last.wait_for()
            tab.wait_for_timeout(_MS_TO_SETTLE)
            if part is None:
                tab.screenshot(path=picture)
            else:
                tab.locator(part).first.screenshot(path=picture)
        except Error as error:
            raise RuntimeError(f"{browser}: wrote no picture: {str(error).splitlines()[0]}") from error
        finally:
            launched.close()


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.pictures", description=__doc__)
    parser.add_argument("page", help="an HTML file, or an address")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--width", type=int, default=1100, help="pixels (1100)")
    parser.add_argument("--height", type=int, default=640, help="pixels (640)")
    parser.add_argument("--part", help="CSS selector of one element to show alone")
    arguments = parser.parse_args(argv)
    try:
        take_picture(arguments.page, arguments.picture, arguments.width, arguments.height, arguments.part)
    except (FileNotFoundError, RuntimeError) as error:
        sys.stderr.write(f"studies.pictures: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
