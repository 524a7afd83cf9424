"""A search in a process of its own, and what it tells while it runs."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from typing import Any

from layerskip.command_line.cli import CommandError
from studies.scaling.servers import ROOT, child_environment


def events_of(command: Sequence[str], **environment: str) -> Generator[tuple[dict[str, Any], int]]:
    """Runs `search.run --json`: each event as it comes, and the id of the process. Closing this ends the search.

    Raises: CommandError with the last line of its stderr if it fails.
    """
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=ROOT, env=child_environment(**environment), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    yield json.loads(line), process.pid
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        last = (errors.read().splitlines() or [""])[-1]
    if process.returncode:
        raise CommandError(f"the search ended with code {process.returncode}: {last}")
