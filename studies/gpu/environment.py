"""What the GPU study needs of a machine: `python -m studies.gpu.environment --help`.

Imports neither of the two packages, nor what they need: it must run where that is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROG = "studies.gpu.environment"
ROOT = Path(__file__).resolve().parents[2]
TEST_PACKAGES = ("pytest", "hypothesis", "pytest-timeout")
"""Of the test extra, what `pytest -m gpu` needs: without pytest-timeout, pyproject.toml's settings are refused."""
TRUSTED = ("torch", "transformers", "numpy", "scipy")  # an image's own builds: looked at themselves, not what they need
GIB = 2**30

VersionOf = Callable[[str], str]
RequiresOf = Callable[[str], "list[str] | None"]


def project_requirements(project: Path = ROOT / "pyproject.toml") -> list[Requirement]:
    """What the two packages and the GPU tests need, as pyproject.toml says it."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    needed = [Requirement(text) for text in table["dependencies"]]
    tests = [Requirement(text) for text in table["optional-dependencies"]["test"]]
    return needed + [one for one in tests if one.name in TEST_PACKAGES]


def missing_packages(
    needed: Iterable[Requirement], version_of: VersionOf = version, requires_of: RequiresOf = requires
) -> list[str]:
    """Requirements that are not met, with the version found, and those of their requirements; sorted.

    What a missing package needs in its turn is not known here: look again once it is there.
    """
    unmet, seen, queue = set(), set(), list(needed)
    while queue:
        one = queue.pop()
        if str(one) in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(one))
        try:
            found = version_of(one.name)
        except PackageNotFoundError:
            unmet.add(f"{one.name}{one.specifier}: not installed")
            continue
        if not one.specifier.contains(found, prereleases=True):
            unmet.add(f"{one.name}{one.specifier}: {found} is installed")
        elif canonicalize_name(one.name) not in TRUSTED:
            queue += [Requirement(text) for text in requires_of(one.name) or []]
    return sorted(unmet)


def device_facts(device: str, min_gib: float) -> tuple[dict[str, Any], list[str]]:
    """(facts of the device, what is wrong with it). Needs torch."""
    import torch

    facts: dict[str, Any] = {"device": "cpu", "num_cpus": os.cpu_count()}
    if torch.device(device).type != "cuda":
        return facts, []
    if not torch.cuda.is_available():
        return facts, [f"a CUDA device: torch {torch.__version__} sees none"]
    free, total = torch.cuda.mem_get_info(device)
    facts |= {
        "device": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_gib": round(total / GIB, 1),
        "free_memory_gib": round(free / GIB, 1),
        "cuda": torch.version.cuda,
    }
    wrong = [] if free >= min_gib * GIB else [f"{min_gib:g} GiB of GPU memory, {free / GIB:.1f} are free"]
    return facts, wrong


def check(device: str, *, min_gpu_gib: float, min_disk_gib: float, work: Path) -> tuple[dict[str, Any], list[str]]:
    """(facts of the machine, what it lacks). Looks at the device only where torch is installed."""
    needed = project_requirements()
    lacks = missing_packages(needed)
    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    if _installed("torch"):
        of_device, wrong = device_facts(device, min_gpu_gib)
        facts, lacks = facts | of_device, lacks + wrong
    free = shutil.disk_usage(work).free / GIB
    facts["free_disk_gib"] = round(free, 1)
    if free < min_disk_gib:
        lacks.append(f"{min_disk_gib:g} GiB of disk under {work}, {free:.1f} are free")
    facts["packages"] = {one.name: version(one.name) for one in needed if _installed(one.name)}
    return facts, lacks


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG}",
        description="Look whether a machine can run the GPU study, and print what it is. Exit codes: 0 it can, 1 it "
        "lacks what is printed.",
    )
    parser.add_argument("--device", default="cuda", help="torch device")
    parser.add_argument("--min-gpu-gib", type=float, default=0.0, help="GPU memory that must be free")
    parser.add_argument("--min-disk-gib", type=float, default=0.0, help="disk that must be free")
    parser.add_argument("--work", type=Path, default=Path(), help="folder in which the disk must be free")
    given = parser.parse_args(argv)
    facts, lacks = check(given.device, min_gpu_gib=given.min_gpu_gib, min_disk_gib=given.min_disk_gib, work=given.work)
    sys.stdout.write(json.dumps(facts, indent=1) + "\n" + "".join(f"lacking: {line}\n" for line in lacks))
    return 1 if lacks else 0


if __name__ == "__main__":
    raise SystemExit(main())
