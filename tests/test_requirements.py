"""Every direct requirement has a lower bound, and `make test-minimum` installs exactly those."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALLED = ("dependencies", "test", "serve", "postgres", "grpc", "large", "quantized", "structured")
"""What `.[test]` comes to."""


@pytest.fixture(scope="module")
def minimum() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimum", ROOT / ".ci" / "minimum.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements(*parts: str) -> list[Requirement]:
    tables = {"dependencies": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    found = [Requirement(text) for part in parts for text in tables[part]]
    return [one for one in found if one.name != PROJECT["name"]]


def lower_bounds(one: Requirement) -> list[str]:
    return [bound.version for bound in one.specifier if bound.operator == ">="]


def test_every_direct_requirement_has_one_lower_bound(minimum: ModuleType) -> None:
    for one in requirements("dependencies", *PROJECT["optional-dependencies"]):
        assert len(lower_bounds(one)) == 1, one
    for text in ("torch", "torch<3", "torch==2.11", "torch~=2.11", "torch>=2.11; sys_platform == 'linux'"):
        with pytest.raises(ValueError, match=r"pyproject\.toml: .* must be NAME>=VERSION"):
            minimum.lowest(text)


def test_the_constraints_are_the_lower_bounds_of_all_that_is_installed(
    minimum: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = sorted(f"{one.name}=={lower_bounds(one)[0]}" for one in requirements(*INSTALLED))
    assert minimum.main(["--extra", "test"]) == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert minimum.main(["--extra", "test", "--free", "torch"]) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in expected if not line.startswith("torch==")]
    with pytest.raises(ValueError, match="--free: must be direct requirements, got torsh"):
        minimum.constraints(PROJECT, ["test"], ["torsh"])


def test_the_pinned_versions_are_admitted() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    for one in requirements(*INSTALLED):
        assert one.specifier.contains(pinned[one.name]), one
