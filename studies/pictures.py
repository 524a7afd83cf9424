"""python -m studies.pictures PAGE.html PICTURE.png: what a browser shows of a page, for the README."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS_TO_DRAW = 15


def take_picture(page: Path, picture: Path, width: int, height: int) -> None:
    """Open a page in a headless browser and write a PNG of so many pixels.

    Raises: FileNotFoundError without a page or a browser, RuntimeError if the browser writes nothing.
    """
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError(f"no browser: one of {', '.join(_BROWSERS)} is needed")
    if not page.is_file():
        raise FileNotFoundError(f"{page}: no such page")
    with tempfile.TemporaryDirectory() as profile:
        result = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                f"--virtual-time-budget={1000 * _SECONDS_TO_DRAW}",
                f"--screenshot={picture.resolve()}",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=8 * _SECONDS_TO_DRAW,
            check=False,
        )
    if result.returncode or not picture.is_file():
        raise RuntimeError(f"{browser}: wrote no picture: {result.stderr.strip()[-300:]}")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.pictures", description=__doc__)
    parser.add_argument("page", type=Path, help="an HTML file")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--width", type=int, default=1100, help="pixels (1100)")
    parser.add_argument("--height", type=int, default=640, help="pixels (640)")
    arguments = parser.parse_args(argv)
    try:
        take_picture(arguments.page, arguments.picture, arguments.width, arguments.height)
    except (FileNotFoundError, RuntimeError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"studies.pictures: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
