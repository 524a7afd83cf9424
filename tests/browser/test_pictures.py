"""The script that makes the READMEs' pictures, on a finished study of a tiny model."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from playwright.sync_api import Browser

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY))
from studies.pictures.__main__ import main  # noqa: E402 (no installed package)

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SIZES = {
    "report.png": (1100, 640),
    "dashboard.png": (1280, 690),
    "notebook-explore.png": None,
}
"""Pixels; None where they follow from what is shown."""
WORDS = {
    "terminal.svg": ["trials", "machine", "3 of 4", "plain"],
    "generate.svg": ["--show-drafts", "tokens: ", "rejected", "tokens identical: yes"],
}


def words_of(svg: Path) -> str:
    """All of a picture's text; its blanks are no-break ones."""
    texts = ElementTree.fromstring(svg.read_text(encoding="utf-8")).iter("{http://www.w3.org/2000/svg}text")
    return "".join(text.text or "" for text in texts).replace("\xa0", " ")


def test_every_surface_is_drawn(browser: Browser, real_study: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    shutil.copytree(real_study, study)
    out = tmp_path / "pictures"
    command = [sys.executable, "-m", "studies.pictures", "--study", str(study), "--out", str(out)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert {file.name for file in out.iterdir()} == {*SIZES, *WORDS}
    for name, size in SIZES.items():
        data = (out / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 5_000 < len(data) < 300_000, name  # a blank page has fewer bytes
        assert size is None or struct.unpack(">II", data[16:24]) == size, name
    for name, words in WORDS.items():
        svg = (out / name).read_text(encoding="utf-8")
        assert "http" not in svg.replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
        assert str(tmp_path) not in words_of(out / name)
        for word in words:
            assert word in words_of(out / name), (name, word)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--study", str(tmp_path)]) == 2
    assert "best.json: no such file; name a finished study" in capsys.readouterr().err
    (tmp_path / "best.json").touch()
    assert main(["--study", str(tmp_path), "--only", "report, radio"]) == 2
    said = capsys.readouterr().err
    assert "--only: must be of report, dashboard, terminal, notebooks, generate, got 'radio'" in said
    assert said.count("\n") == 1
