"""The READMEs name what is there: links, modules, files, the steps of the code, and its flags."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from layerskip import generate
from search import run

ROOT = Path(__file__).parents[1]
DOOR, DECODING, ENGINES, SERVING, SEARCH, PREDICTING, STUDIES = (
    "README.md",
    "layerskip/README.md",
    "layerskip/engines/README.md",
    "layerskip/server/README.md",
    "search/README.md",
    "search/predict/README.md",
    "studies/README.md",
)
DOCUMENTS = {DOOR: 180, DECODING: 250, ENGINES: 100, SERVING: 100, SEARCH: 250, PREDICTING: 250, STUDIES: 250}
"""Most lines of each: they are read by tired people."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def defined_in(path: Path) -> set[str]:
    """Functions, methods and classes of a file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def steps(document: str) -> list[str]:
    """The numbered list."""
    return re.findall(r"^\d+\. (.+(?:\n   .+)*)", text_of(document), re.MULTILINE)


def tree(document: str) -> str:
    """The block under `## Files`."""
    found = re.search(r"^## Files\n\n```\n(.+?)```", text_of(document), re.DOTALL | re.MULTILINE)
    return found[1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_it_is_short_and_what_it_names_is_there(document: str) -> None:
    text = text_of(document)
    assert len(text.splitlines()) <= DOCUMENTS[document]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links or document == PREDICTING
    for link in links:
        name, _, anchor = link.partition("#")
        path = (ROOT / document).parent / name
        assert path.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link
    outputs = set(re.findall(r"studies/[\w./-]+\.(?:jsonl\.xz|json|md|png|svg)", text))
    made_by_the_reader = {one for one in outputs if one.startswith("studies/my_")}
    assert [one for one in sorted(outputs - made_by_the_reader) if not (ROOT / one).is_file()] == []
    modules = {
        name for name in re.findall(r"python -m ([\w.]+)", text) if name.split(".")[0] in ("search", "layerskip")
    }
    modules |= set(re.findall(r"python -m (studies[\w.]*\w)", text))
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("document", [DECODING, SEARCH])
def test_every_step_names_a_file_and_what_is_defined_in_it(document: str) -> None:
    found = steps(document)
    assert 10 <= len(found) <= 15
    for step in found:
        named = re.findall(r"`([\w./]+\.py)`(?: `(\w+)`)?", step)
        assert named, step
        assert any(name for _, name in named), step
        for file, name in named:
            path = (ROOT / document).parent / file
            assert path.is_file(), step
            assert not name or name in defined_in(path), step


@pytest.mark.parametrize("document", [DECODING, SEARCH])
def test_the_file_tree_holds_every_module_of_the_package_and_no_other(document: str) -> None:
    folder = (ROOT / document).parent
    block, place = tree(document), ""
    told = set()
    for line in block.splitlines():
        if (start := re.match(r"([\w/]+)/ ", line)) is not None:
            place = f"{start[1]}/"
        elif not line.startswith(" "):
            place = ""
        told |= {place + name for name in re.findall(r"\w+\.py", line)}
    modules = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"}
    assert told == modules


def test_the_tree_of_studies_holds_every_study() -> None:
    folder = ROOT / "studies"
    told = set(re.findall(r"^([\w.]+)/? ", tree(STUDIES), re.MULTILINE))
    assert [name for name in sorted(told) if not (folder / name).exists()] == []
    modules = {path.name for path in folder.glob("*.py") if path.name != "__init__.py"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert modules | packages <= told


def test_what_the_notation_names_is_in_the_code() -> None:
    rows = re.findall(r"^\|.+\|.+\| (.+) \|$", text_of(PREDICTING), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 8
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "search").rglob("*.py"))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_are_understood(document: str) -> None:
    text = text_of(document).replace("\\\n", " ")
    parsers = {"search.run": run.build_parser(), "layerskip.generate": generate.build_parser()}
    for line in re.findall(r"^\$ (python -m .+)$", text, re.MULTILINE):
        _, _, module, *flags = shlex.split(line, comments=True)
        if module in parsers:
            parsers[module].parse_args(flags)
    if document == SEARCH:
        table = re.findall(r"^\| (`--.+?) \|", text, re.MULTILINE)
        named = {flag for row in table for flag in re.findall(r"--[a-z0-9-]+", row)}
        assert len(named) > 10
        told = run.build_parser().format_help()
        assert [flag for flag in sorted(named) if not re.search(rf"{flag}(?![\w-])", told)] == []
