"""The wheels to bring to a machine that lacks packages: `python -m studies.gpu.wheels --help`.

Walks the metadata of the packages installed here. Imports neither of the two packages.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from studies.gpu.environment import project_requirements

PROG = "studies.gpu.wheels"
PRESENT = ("torch", "transformers", "numpy")
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MIB = 2**20

Find = Callable[[str], Distribution]


@dataclass(frozen=True)
class Wheel:
    """A package to bring."""

    name: str
    version: str
    num_bytes: int
    is_file: bool
    """Its bytes are those of a wheel at hand; else those of the files installed from it, which are more."""


def to_bring(
    needed: Iterable[Requirement], present: Iterable[str], python: str = PYTHON, find: Find = distribution
) -> list[str]:
    """Names of the packages that the requirements come to, with all that is needed in turn; sorted.

    Left out are the packages `present` and what these require themselves, unless a newer version of that is required
    here: a machine with torch has some typing-extensions, but perhaps not the one that pydantic needs. What those
    require in their turn is not left out, because other versions of them have other needs.
    Raises: PackageNotFoundError for a package that is not installed here.
    """
    named = {canonicalize_name(name) for name in present}
    there: dict[str, Version] = {}
    for one in (one for name in named for one in _requirements(name, "", python, find)):
        name = canonicalize_name(one.name)
        there[name] = max(_lowest(one), there.get(name, _lowest(one)))
    wanted: set[str] = set()
    seen: set[tuple[str, str]] = set()
    queue = list(needed)
    while queue:
        one = queue.pop()
        name = canonicalize_name(one.name)
        if name in named or (name in there and _lowest(one) <= there[name]):
            continue
        wanted.add(name)
        for extra in {"", *one.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            queue += _requirements(name, extra, python, find)
    return sorted(wanted)


def _requirements(name: str, extra: str, python: str, find: Find) -> list[Requirement]:
    """Those that hold on the machine."""
    there = {**_target(python), "extra": extra}
    all_of_it = [Requirement(text) for text in find(name).requires or []]
    return [one for one in all_of_it if one.marker is None or one.marker.evaluate(there)]


def _target(python: str) -> dict[str, str]:
    """The environment of markers there."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }


def _lowest(one: Requirement) -> Version:
    """The lowest version it admits, 0 where any will do."""
    bounds = [bound.version for bound in one.specifier if bound.operator in (">=", ">", "~=", "==")]
    return max((Version(bound.removesuffix(".*")) for bound in bounds), default=Version("0"))


def measured(names: Iterable[str], folder: Path | None = None, find: Find = distribution) -> list[Wheel]:
    """Versions and sizes, those of a wheel where the folder has the one of the version installed here."""
    files = {parse_wheel_filename(path.name)[:2]: path for path in folder.glob("*.whl")} if folder else {}
    wheels = []
    for name in names:
        found = find(name)
        path = files.get((canonicalize_name(name), Version(found.version)))
        num_bytes = path.stat().st_size if path else sum(file.size or 0 for file in found.files or [])
        wheels.append(Wheel(name, found.version, num_bytes, is_file=path is not None))
    return wheels


def download_command(wheels: Iterable[Wheel], python: str) -> str:
    """The command that fetches them, dependencies and all having been found already."""
    words = ["pip", "download", "--no-deps", "--dest", "wheels", "--only-binary=:all:", "--implementation", "cp"]
    words += ["--python-version", python, *(word for each in PLATFORMS for word in ("--platform", each))]
    return shlex.join([*words, *(f"{one.name}=={one.version}" for one in wheels)])


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG}",
        description="List the wheels that the GPU study needs on a machine, as installed here, and the command that "
        "fetches them. Exit codes: 0 done, 1 a package is not installed here, 2 bad arguments.",
    )
    parser.add_argument(
        "--present", nargs="*", default=list(PRESENT), metavar="NAME", help="packages that it has [%(default)s]"
    )
    parser.add_argument("--python-version", default=PYTHON, help="its Python [%(default)s]")
    parser.add_argument("--wheels", type=Path, help="folder of wheels already fetched, whose own sizes are then told")
    given = parser.parse_args(argv)
    if given.wheels is not None and not given.wheels.is_dir():
        parser.error(f"--wheels: must be a folder, got {str(given.wheels)!r}")
    try:
        names = to_bring(project_requirements(), given.present, given.python_version)
        wheels = measured(names, given.wheels)
    except PackageNotFoundError as error:
        sys.stderr.write(
            f"{PROG}: error: {error.name}: is not installed here, so that its version and needs are not known\n"
        )
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in _lines(wheels, given.python_version)))
    return 0


def _lines(wheels: list[Wheel], python: str) -> list[str]:
    width = max((len(one.name) for one in wheels), default=0)
    lines = [
        f"{one.name:<{width}}  {one.version:<10}  {one.num_bytes / MIB:6.2f} MiB{'' if one.is_file else ' *'}"
        for one in wheels
    ]
    lines.append(f"{len(wheels)} wheels, {sum(one.num_bytes for one in wheels) / MIB:.2f} MiB in all")
    if not all(one.is_file for one in wheels):
        lines.append("* of the files installed from it; the wheel is smaller (--wheels FOLDER tells its own size)")
    return [*lines, "", download_command(wheels, python)]


if __name__ == "__main__":
    raise SystemExit(main())
