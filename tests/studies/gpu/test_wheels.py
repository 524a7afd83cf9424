"""Which wheels the GPU study has brought: by the metadata of what is installed."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from studies.gpu import wheels

INSTALLED: dict[str, list[str]] = {
    "app": ["Deep_Lib>=2", "shared>=1.5", "loose", 'old; python_version < "3.12"', 'gpu; extra == "fast"'],
    "deep-lib": ["deeper>=1", 'win; sys_platform == "win32"', 'more; extra == "all"'],
    "deeper": [],
    "engine": ["shared>=1.4", "loose>=2", "below>=1"],
    "shared": [],
    "loose": [],
    "below": ["deeper>=3"],
    "gpu": [],
    "other": ["app[fast]"],
}


def find(name: str) -> Any:
    if name not in INSTALLED:
        raise PackageNotFoundError(name)
    files = [SimpleNamespace(size=700), SimpleNamespace(size=None), SimpleNamespace(size=300)]
    return SimpleNamespace(requires=INSTALLED[name] or None, version="2.0", files=files)


def brought(*needed: str, present: tuple[str, ...] = ()) -> list[str]:
    return wheels.to_bring(map(Requirement, needed), present, find=find)


def test_what_is_needed_in_turn_is_brought_for_the_machines_python_and_system() -> None:
    assert brought("app") == ["app", "deep-lib", "deeper", "loose", "shared"]
    assert brought("other", "app>=1") == ["app", "deep-lib", "deeper", "gpu", "loose", "other", "shared"]
    with pytest.raises(PackageNotFoundError, match="old"):
        wheels.to_bring([Requirement("app")], (), "3.11", find)


def test_what_is_there_is_left_out_unless_it_may_be_too_old() -> None:
    # Of `shared` the engine requires 1.4 and the app 1.5; what `below` needs is not counted on.
    assert brought("app", "engine>=1", present=("engine",)) == ["app", "deep-lib", "deeper", "shared"]
    assert brought("app", "engine>=1", present=("engine", "Deep-Lib", "shared")) == ["app"]


def test_the_list_here_holds_what_the_one_by_hand_lacked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # annotated-types and typing-extensions, which pydantic needs, stopped the first try on a machine.
    assert wheels.main([]) == 0
    out = capsys.readouterr().out
    listed = {line.split()[0]: line.split()[1] for line in out.splitlines() if " MiB *" in line}
    assert {"optuna", "scipy", "sqlalchemy", "pydantic", "annotated-types", "typing-extensions"} <= set(listed)
    assert not {"torch", "transformers", "numpy", "sympy", "tokenizers", "pytest-xdist", "mypy"} & set(listed)
    command = shlex.split(out.splitlines()[-1])
    assert command[:3] == ["pip", "download", "--no-deps"]
    assert [word for word in command if "==" in word] == [f"{name}=={version}" for name, version in listed.items()]
    assert f"{len(listed)} wheels, " in out
    assert "* of the files installed from it; the wheel is smaller" in out
    assert wheels.main(["--present", "torch", "transformers", "numpy", "scipy"]) == 0
    assert "scipy" not in capsys.readouterr().out


def test_what_cannot_be_listed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main(["--present", "torch", "no-such-thing"]) == 1
    assert "no-such-thing: is not installed here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        wheels.main(["--wheels", "nowhere"])
    assert "--wheels: must be a folder, got 'nowhere'" in capsys.readouterr().err
