"""The notebooks run top to bottom on a small finished study, and are committed without output."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from search import run

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["explore_a_study.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_on_a_finished_study(
    path: Path, tiny_study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main(tiny_study) == 0
    monkeypatch.setenv("LAYERSKIP_STUDY", str(tmp_path / "study"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    drawn = [figure.data["application/vnd.plotly.v1+json"] for figure in figures]
    assert all(figure["data"] for figure in drawn)
    titles = [figure["layout"]["title"]["text"].partition("<br>")[0] for figure in drawn]
    assert titles == [
        "Speedup by trial",
        "Predicted against measured",
        "Which sublayers matter",
        "What a step costs",
        "Acceptance against skipped sublayers",
        "Skipped sublayers (dark = kept)",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_committed_without_output(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
