"""Spec-Bench's questions as prompts: of each task equally many."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from layerskip.prompts import read_prompts
from studies.spec_bench.make_prompts import main

CATEGORIES = ("qa", "rag", "writing", "math")
"""The last two are of MT-Bench."""


def questions(tmp_path: Path, count: int = 6) -> Path:
    lines = [
        json.dumps(
            {"question_id": place, "category": category, "turns": [f"{category} {place}?", "And why?"]}
            | ({"reference": [["of", "lists"]]} if category == "rag" else {})
        )
        for place, category in enumerate(category for category in CATEGORIES for _ in range(count))
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return file


def test_both_files_have_as_many_of_each_task_and_none_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(questions(tmp_path)), "--per-task", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    assert capsys.readouterr().out == "tuning.jsonl: 6 prompts\nheld_out.jsonl: 12 prompts\n"
    files = [(tmp_path / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("tuning", "held_out")]
    lines = [[json.loads(line) for line in text.splitlines()] for text in files]
    for some, count in zip(lines, (2, 4), strict=True):
        tasks = [line["category"] for line in some]
        assert Counter(tasks) == {"multi-turn": count, "qa": count, "rag": count}
        assert tasks[:3] == tasks[3:6]
    assert not {line["id"] for line in lines[0]} & {line["id"] for line in lines[1]}
    assert lines[0][0]["messages"][0]["content"].endswith("?")
    assert len(read_prompts(tmp_path / "tuning.jsonl")) == 6
    assert main(command) == 0
    assert [(tmp_path / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("tuning", "held_out")] == files


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ("", ["--per-task", "3"], "--per-task: qa has 6 questions, too few for three times 3"),
        ("", ["--per-task", "0"], "--per-task: must be at least 1, got 0"),
        ('{"prompt": "def"}', [], "question.jsonl:25: must be a question of Spec-Bench, with turns"),
        ("{", [], "question.jsonl:25: not valid JSON"),
        ("", ["--out", "nowhere"], "--out: no such folder: nowhere"),
    ],
)
def test_refusals(
    line: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = questions(tmp_path)
    file.write_text(file.read_text(encoding="utf-8") + line, encoding="utf-8")
    assert main([str(file), "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.glob("*g.jsonl")]
    file.unlink()
    assert main([str(file), "--out", str(tmp_path)]) == 2
    assert f"{file}: no such prompt file" in capsys.readouterr().err
