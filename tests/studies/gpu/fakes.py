"""A part of the GPU study whose steps go wrong in every way. In a file of its own: other processes import it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.gpu.book import Book, read
from studies.gpu.runner import Job, Step, run_part


@dataclass(frozen=True)
class Mishaps:
    """Steps by what they do, each but `hangs` within seconds."""

    words: tuple[str, ...]
    breaks_device: bool = False
    breaks_start: bool = False
    hangs_s: float = 1.5
    """Seconds after which a step that hangs is stopped."""
    name: str = "a"
    size: str = "tiny"

    def steps(self) -> Sequence[Step]:
        return [Step(word, self.hangs_s if word == "hangs" else 60.0) for word in self.words]

    def facts(self) -> dict[str, Any]:
        if self.breaks_start:
            raise RuntimeError("no such device")
        return {"pid": os.getpid()}

    def moment(self) -> dict[str, Any]:
        return {"clock": 1}

    def is_sound(self) -> bool:
        return not self.breaks_device

    def run(self, step: str, job: Job) -> None:
        job.add(step=step, pid=os.getpid(), has_time=0 < job.left_s <= 60)
        if step == "raises":
            raise ValueError("the reason")
        if step == "hangs":
            time.sleep(60)
        if step == "dies":
            os._exit(9)


def run(part: Mishaps, file: Path, seconds: float = 60.0) -> dict[str, Any]:
    run_part(part, Book.open(file, part.name, part.size), seconds)
    return read(file)
