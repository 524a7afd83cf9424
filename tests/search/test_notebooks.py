"""The notebooks run top to bottom on a small finished study, and are committed without output."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from search import run
from tests.search.conftest import tiny_flags

pytestmark = pytest.mark.slow

FIGURES = {
    "decode_with_a_config.ipynb": ["Drafted and accepted by position", "Tokens per second"],
    "explore_a_study.ipynb": [
        "Speedup by trial",
        "Predicted against measured",
        "Which sublayers matter",
        "What a step costs",
        "Acceptance against skipped sublayers",
        "Skipped sublayers (dark = kept)",
    ],
}
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == list(FIGURES)


@pytest.fixture(scope="module")
def finished_study(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert run.main(tiny_flags(tiny_model, folder)) == 0
    return folder / "study"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_on_a_finished_study(path: Path, finished_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERSKIP_STUDY", str(finished_study))
    monkeypatch.setenv("LAYERSKIP_PROMPTS", "2")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    drawn = [figure.data["application/vnd.plotly.v1+json"] for figure in figures]
    assert all(figure["data"] for figure in drawn)
    titles = [figure["layout"]["title"]["text"].partition("<br>")[0] for figure in drawn]
    assert titles == FIGURES[path.name]


def test_a_notebook_shows_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's config rejects some drafts of this prompt: they are struck through, and the output is marked."""
    monkeypatch.delenv("LAYERSKIP_STUDY", raising=False)
    notebook = nbformat.read(NOTEBOOKS[0].parent / "decode_with_a_config.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:2]
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOKS[0].parent)}}).execute()
    (shown,) = [output.data["text/html"] for output in notebook.cells[1].outputs]
    assert shown.count("line-through") > 2
    accepted, looked_up = shown.count("#15803d"), shown.count("#a21caf")
    assert accepted + looked_up > 20


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_committed_without_output(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
