"""The surfaces: each draws what a person sees of one study, into the folder of the pictures."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

from playwright.sync_api import Page
from rich.console import Console

from layerskip.config.decode_config import write_atomically
from search import report
from search.reporting.record import read_record
from search.reporting.source import Address, opened
from studies.pictures.browser import take_picture
from studies.pictures.notebook_page import notebook_page
from studies.pictures.terminal import live_view, picture_of, run_in_terminal

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_COLUMNS = 110
_PROMPT = "def read("
_DASHBOARD_HEAD = 72
"""Pixels at its top that stay while the page scrolls."""

Surface = Callable[[Path, Path], list[Path]]
"""(study folder, folder of the pictures) -> what was written."""


def draw_report(study: Path, out: Path) -> list[Path]:
    """The report's first screen."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if report.main([str(study), "--out", str(page)]) != 0:
            raise RuntimeError(f"{study}: has no report")
        picture = out / "report.png"
        take_picture(page, picture, 1100, 640)
    return [picture]


def draw_dashboard(study: Path, out: Path) -> list[Path]:
    """The study's page in optuna-dashboard where our figures begin."""
    picture = out / "dashboard.png"
    with _dashboard(study) as address:
        take_picture(address, picture, 1280, 690, prepare=_show_our_figures)
    return [picture]


def _show_our_figures(tab: Page) -> None:
    tab.locator("[id^='user-defined-plot:']").first.evaluate("figure => figure.scrollIntoView()")
    tab.mouse.wheel(0, -_DASHBOARD_HEAD)  # from under the page's own head


@contextmanager
def _dashboard(study: Path) -> Iterator[str]:
    """The command runs meanwhile; the address of the study's page."""
    command = [sys.executable, "-m", "search.dashboard", "--study", str(study), "--port", "0"]
    # The dashboard keeps figures in a set: their order would be another one each time.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    with subprocess.Popen(command, env=environment, text=True, stdout=PIPE, stderr=PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError(process.stderr.read().strip())
            yield address
        finally:
            process.terminate()


def draw_terminal(study: Path, out: Path) -> list[Path]:
    """The live view of the search."""
    with opened(Address(str(study)), demo=study) as source:
        svg = live_view(read_record(source.load()), _COLUMNS)
    return [_write(out / "terminal.svg", svg)]


def draw_generate(study: Path, out: Path) -> list[Path]:
    """`layerskip.generate --show-drafts --compare`, run now."""
    arguments = ["--prompt", _PROMPT, "--show-drafts", "--compare"]
    command = ["-m", "layerskip.generate", "--config", str(study / "best.json"), *arguments]
    shown = shlex.join(["python", *command]).replace(str(study), f"studies/{study.name}")
    printed = run_in_terminal([sys.executable, *command], _COLUMNS)

    def draw(console: Console) -> None:
        console.print(f"$ {shown}", style="bold", markup=False)
        console.print(printed)

    return [_write(out / "generate.svg", picture_of(draw, "layerskip.generate --show-drafts", _COLUMNS))]


def draw_notebooks(study: Path, out: Path) -> list[Path]:
    """A section of the notebook that explores a study, run now."""
    picture = out / "notebook-explore.png"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "explore_a_study.html"
        page.write_text(notebook_page(NOTEBOOKS / "explore_a_study.ipynb", study), encoding="utf-8")
        take_picture(page, picture, 992, 900, part="#convergence")
    return [picture]


def _write(path: Path, svg: str) -> Path:
    write_atomically(path, svg)
    return path


SURFACES: dict[str, Surface] = {
    "report": draw_report,
    "dashboard": draw_dashboard,
    "terminal": draw_terminal,
    "notebooks": draw_notebooks,
    "generate": draw_generate,
}
