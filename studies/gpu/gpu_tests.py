"""Part B of the GPU study: the tests marked gpu, one by one, so that none ends the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.gpu.environment import ROOT
from studies.gpu.machine import device_is_sound, machine_facts
from studies.gpu.runner import Job, Step

_BOUND_S = 60.0
_COLLECT_S = 120.0
_FLAGS = ("-p", "no:cacheprovider")
_REHEARSAL = ("tests/layerskip/engines/cuda_graph/test_cuda_graph_gpu.py", "-k", "64")
"""Of the tests that run on a CPU too, those of one shape."""


@dataclass(frozen=True)
class GpuTests:
    """See `runner.Part`. At size `tiny` the same tests' runs on a CPU, where recordings are played by running again."""

    size: str
    name: str = "b"

    def steps(self) -> Sequence[Step]:
        """A step a test. Cost: a process that collects them. Raises: ValueError with its output if it cannot."""
        chosen = [*_REHEARSAL, "-m", "not gpu"] if self.size == "tiny" else [*_files(), "-m", "gpu"]
        command = [sys.executable, "-m", "pytest", *_FLAGS, "--collect-only", *chosen]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_COLLECT_S, check=False)
        tests = [line.strip() for line in done.stdout.splitlines() if "::" in line and not line.startswith(" ")]
        if done.returncode or not tests:
            raise ValueError(f"part b: the tests cannot be collected: {(done.stdout + done.stderr)[-1000:]}")
        return [Step(test, _BOUND_S) for test in tests]

    def facts(self) -> dict[str, Any]:
        return machine_facts()

    def moment(self) -> dict[str, Any]:
        """Nothing: it would take longer than most tests."""
        return {}

    def is_sound(self) -> bool:
        return device_is_sound()

    def run(self, step: str, job: Job) -> None:
        """Raises: AssertionError with the test's report if it failed."""
        import pytest

        outcome = _Outcome()
        pytest.main([*_FLAGS, "--no-header", "--no-summary", "--rootdir", str(ROOT), f"{ROOT}/{step}"], [outcome])
        job.add(outcome=outcome.word, reason=outcome.reason, properties=dict(outcome.properties))
        if outcome.word not in ("passed", "skipped"):
            raise AssertionError(outcome.reason)


class _Outcome:
    """A pytest plugin that listens to one test."""

    def __init__(self) -> None:
        self.word = "not found"
        self.reason = ""
        self.properties: list[tuple[str, object]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        # Setup and teardown say something only where they fail or skip.
        if report.when == "call" or report.outcome != "passed":
            self.word = report.outcome
            self.reason = report.longrepr[2] if report.skipped else report.longreprtext
            self.properties = list(report.user_properties)


def _files() -> list[str]:
    """Test files with such a mark; others may import what only their own tests need."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(file.relative_to(ROOT)) for file in files if "mark.gpu" in _text(file))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
