"""The course of a process's resident memory, and what the studies of it write. Linux only: it is read from /proc."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerskip.config.decode_config import write_atomically
from layerskip.machine.host import cpu_name
from studies.results import facts, markdown_table, write_json

FOLDER = Path(__file__).parent
LIMIT = 0.05
"""Of what is resident after the warm-up: by so much memory may exceed it later."""
WARM_UP = 0.1
"""Share of a run: 50 of 500 trials, 6 of 60 minutes."""
_MOST_WRITTEN = 60
_NAMES = ("search", "serve")


@dataclass
class Course:
    """Samples of one process, in the order of time."""

    unit: str
    """`trials` or `minutes`."""
    length: float
    """Of the run, in that unit."""
    at: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)

    def sample(self, at: float, pid: int) -> float:
        """Look at the process now. Raises: OSError if it has ended."""
        self.at.append(at)
        self.rss_mib.append(resident_mib(pid))
        return self.rss_mib[-1]

    @property
    def after_warm_up(self) -> list[float]:
        """MiB from the first sample after the warm-up on. Raises: ValueError if there is none."""
        later = [mib for at, mib in zip(self.at, self.rss_mib, strict=True) if at >= WARM_UP * self.length]
        if not later:
            raise ValueError(f"no sample after {WARM_UP * self.length:g} {self.unit}: the process ended before")
        return later

    @property
    def growth(self) -> float:
        """Share by which the end exceeds what there was after the warm-up."""
        return self.after_warm_up[-1] / self.after_warm_up[0] - 1

    @property
    def most_growth(self) -> float:
        """The same of the largest sample."""
        return max(self.after_warm_up) / self.after_warm_up[0] - 1

    @property
    def is_flat(self) -> bool:
        """Nothing after the warm-up exceeds it by more than the limit."""
        return self.most_growth <= LIMIT

    def to_json(self) -> dict[str, Any]:
        """The figures, and at most some sixty of the samples, evenly spread."""
        later, every = self.after_warm_up, max(1, -(-len(self.at) // _MOST_WRITTEN))
        chosen = sorted({*range(0, len(self.at), every), len(self.at) - 1})
        return {
            "unit": self.unit,
            "length": self.length,
            "num_samples": len(self.at),
            "warm_up": WARM_UP * self.length,
            "rss_mib_after_warm_up": round(later[0], 1),
            "rss_mib_at_end": round(later[-1], 1),
            "rss_mib_most": round(max(later), 1),
            "growth": round(self.growth, 4),
            "most_growth": round(self.most_growth, 4),
            "limit": LIMIT,
            "is_flat": self.is_flat,
            "samples": [[round(self.at[i], 2), round(self.rss_mib[i], 1)] for i in chosen],
        }


def resident_mib(pid: int) -> float:
    """VmRSS of a process: private pages and those of mapped files. Raises: OSError if it has ended."""
    return _status_mib(pid, "VmRSS:")


def _status_mib(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has ended")


def peak_mib(pid: int) -> float:
    """VmHWM of a process: the most that it ever had resident. Raises: OSError if it has ended.

    Not `ru_maxrss`, which begins at what the parent had resident.
    """
    return _status_mib(pid, "VmHWM:")


def check_proc() -> None:
    """Raises: ValueError where there is no /proc."""
    if not Path("/proc/self/status").is_file():
        raise ValueError("resident memory is read from /proc, which this system does not have")


def write_course(out: Path, name: str, command: str, course: Course, more: dict[str, Any]) -> str:
    """NAME.json, and table.md over all courses that the folder has; returns the table."""
    load = {"cpu": cpu_name(), "load_average": os.getloadavg()[0]}
    write_json(out / f"{name}.json", facts(command) | load | course.to_json() | more)
    table = make_table(out)
    write_atomically(out / "table.md", table)
    return table


def make_table(folder: Path) -> str:
    """One line for each course in the folder."""
    rows = []
    for name in _NAMES:
        file = folder / f"{name}.json"
        if file.is_file():
            one = json.loads(file.read_text(encoding="utf-8"))
            mib = [f"{one[f'rss_mib_{when}']:.0f}" for when in ("after_warm_up", "at_end", "most")]
            growth = [f"{100 * one[key]:+.1f} %" for key in ("growth", "most_growth")]
            rows.append([name, f"{one['length']:g} {one['unit']}", f"{one['warm_up']:g}", *mib, *growth])
    header = ("run", "length", "warm-up", "MiB after it", "at the end", "most", "growth to the end", "to the most")
    return markdown_table(header, rows)
