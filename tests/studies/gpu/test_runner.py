"""Steps of the GPU study in processes of their own: what fails, hangs or dies costs itself alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from studies.gpu.book import Book, read
from studies.gpu.environment import ROOT
from tests.studies.gpu.fakes import Mishaps, run


@pytest.mark.slow
def test_a_step_that_fails_hangs_or_dies_costs_the_study_that_step_alone(tmp_path: Path) -> None:
    file = tmp_path / "a-tiny.json"
    record = run(Mishaps(("works", "raises", "hangs", "dies", "goes on")), file)
    steps = record["steps"]
    assert [step["state"] for step in steps.values()] == ["done", "failed", "stopped", "failed", "done"]
    assert steps["raises"]["error"].endswith("ValueError: the reason\n")
    assert steps["works"]["before"] == steps["works"]["after"] == steps["hangs"]["before"] == {"clock": 1}
    assert steps["hangs"]["error"].startswith("stopped after")
    assert steps["dies"]["error"] == "its process ended with exit code 9"
    rows = {name: step["rows"][0] for name, step in steps.items()}
    assert [row["step"] for row in rows.values()] == list(rows)
    assert all(row["has_time"] for row in rows.values())
    # One that raised leaves its process whole; one that hung or died does not.
    assert rows["works"]["pid"] == rows["raises"]["pid"] == rows["hangs"]["pid"]
    assert len({rows[name]["pid"] for name in ("hangs", "dies", "goes on")}) == 3
    assert [one["pid"] for one in record["workers"]] == [rows[name]["pid"] for name in ("hangs", "dies", "goes on")]


def test_after_a_failure_that_broke_the_device_the_next_step_has_a_new_process(tmp_path: Path) -> None:
    steps = run(Mishaps(("raises", "goes on"), breaks_device=True), tmp_path / "a.json")["steps"]
    assert steps["goes on"]["state"] == "done"
    assert steps["raises"]["rows"][0]["pid"] != steps["goes on"]["rows"][0]["pid"]


def test_where_no_step_can_run_all_say_why(tmp_path: Path) -> None:
    steps = run(Mishaps(("works", "goes on"), breaks_start=True), tmp_path / "a.json")["steps"]
    assert [step["state"] for step in steps.values()] == ["failed", "failed"]
    assert all("RuntimeError: no such device" in step["error"] for step in steps.values())


def test_a_part_goes_on_where_it_was_left_and_ends_in_time(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    first = run(Mishaps(("works", "dies")), file)["steps"]
    start = time.monotonic()
    late = run(Mishaps(("works", "dies", "goes on")), file, seconds=1e-3)["steps"]
    assert time.monotonic() - start < 1
    assert [step["state"] for step in late.values()] == ["done", "waiting", "waiting"]
    assert late["goes on"]["error"] == "not begun: the part's 0.001 s were over"
    again = run(Mishaps(("works", "raises", "goes on")), file)["steps"]
    assert again["works"] == first["works"]
    assert again["goes on"]["state"] == "done"


def test_a_file_of_another_part_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    run(Mishaps(("works",)), file)
    with pytest.raises(ValueError, match="must be of part b at size tiny, got a tiny"):
        Book.open(file, "b", "tiny")
    file.write_text('{"part": "a"')
    with pytest.raises(ValueError, match="not a file of the GPU study"):
        Book.open(file, "a", "tiny")


@pytest.mark.slow
def test_a_killed_command_leaves_what_it_found_and_no_process(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    code = (
        "from pathlib import Path; from tests.studies.gpu.fakes import Mishaps, run\n"
        f"if __name__ == '__main__': run(Mishaps(('works', 'hangs'), hangs_s=60.0), Path({str(file)!r}))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}) as command:
        try:
            wait_for(lambda: file.is_file() and any(row["step"] == "hangs" for row in rows_of(read(file))))
        finally:  # a failure too, or leaving the block waits for it forever
            command.kill()
    record = read(file)
    assert [step["state"] for step in record["steps"].values()] == ["done", "running"]
    wait_for(lambda: not Path(f"/proc/{record['workers'][0]['pid']}").exists())


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for step in record["steps"].values() for row in step["rows"]]


def wait_for(happened: Callable[[], bool]) -> None:
    """Raises: AssertionError after a minute."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
