"""python -m studies.smollm2.make_prompts: chat prompts of five kinds, written by hand or about the standard library."""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from layerskip.command_line.cli import OneLineParser, run_command

PROG = "studies.smollm2.make_prompts"
HERE = Path(__file__).resolve().parent
NUM_TUNING = 40
"""As many of each kind as of every other; the rest is held out."""
_SEED = 5

_FORMS = {
    "ask": "Explain {} in simple words.",
    "code": "Write a Python function that {}.",
    "write": "Write {}.",
}
"""What is made of each kind's topics in topics.json."""
_DOCUMENTED = 32
"""Modules of which the documentation is summarised, and as many functions that are changed."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo"}
_WORDS = (40, 110)
_LINES = (5, 14)
_LONGER = (12, 24)
_CHANGES = (
    "Add type hints to all parameters of this function.",
    "Add a docstring to this function that documents every parameter.",
    "Rename `{name}` to `new_{name}` everywhere in this function.",
    "Let this function log its arguments by `logging.debug` before it does anything else.",
    "Make all parameters of this function keyword-only.",
    "Let this function raise a ValueError with a clear message where `{name}` is None.",
)
"""What is asked of one function after the other, `name` being its first parameter."""
_CHANGED = slice(15, 31)
"""Which of them are taken; the rest may tune."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for tuning.jsonl and held_out.jsonl")
    parser.add_argument(
        "--training",
        type=Path,
        metavar="FILE",
        help="write prompts to train draft weights on instead: of the last two kinds, about the library's packages, "
        "from none of which a prompt that tunes or judges is taken",
    )
    parser.add_argument(
        "--changes",
        type=Path,
        metavar="FILE",
        help="write prompts that ask for a change to a function of 12 to 24 lines instead, the whole of each",
    )
    arguments = parser.parse_args(argv)
    if arguments.training:
        return run_command(PROG, lambda: _write_training(arguments.training))
    if arguments.changes:
        return run_command(PROG, lambda: _write_changes(arguments.changes))
    return run_command(PROG, lambda: _write(arguments.out))


def _write_changes(file: Path) -> int:
    rows = []
    found = [node for node in _functions(_modules("*.py"), _LONGER) if node.args.args]
    for i, node in enumerate(found):
        change = _CHANGES[i % len(_CHANGES)].format(name=node.args.args[0].arg)
        text = f"{change} Answer with the whole function.\n\n```python\n{ast.unparse(node)}\n```"
        rows.append(_row("change", i, text))
    random.Random(_SEED).shuffle(rows)
    _save(file, rows[_CHANGED])
    return 0


def _write(out: Path) -> int:
    rng = random.Random(_SEED)
    topics = json.loads((HERE / "topics.json").read_text(encoding="utf-8"))
    kinds = {name: [_FORMS[name].format(one) for one in told] for name, told in topics.items()}
    kinds |= {kind: texts[:_DOCUMENTED] for kind, texts in _of_modules("*.py").items()}
    share = NUM_TUNING // len(kinds)
    rows: dict[str, list[dict[str, object]]] = {"tuning.jsonl": [], "held_out.jsonl": []}
    for kind, texts in kinds.items():
        for i, text in enumerate(rng.sample(texts, len(texts))):
            rows["tuning.jsonl" if i < share else "held_out.jsonl"].append(_row(kind, i, text))
    for name, found in rows.items():
        rng.shuffle(found)
        _save(out / name, found)
    return 0


def _write_training(file: Path) -> int:
    known = {text for texts in _of_modules("*.py").values() for text in texts}
    found = {kind: [text for text in texts if text not in known] for kind, texts in _of_modules("*/**/*.py").items()}
    _save(file, [_row(kind, i, text) for kind, texts in found.items() for i, text in enumerate(texts)])
    return 0


def _row(kind: str, number: int, text: str) -> dict[str, object]:
    return {"id": f"{kind}:{number}", "category": kind, "messages": [{"role": "user", "content": text}]}


def _save(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{file}: {len(rows)} prompts\n")


def _of_modules(pattern: str) -> dict[str, list[str]]:
    """Prompts by kind about modules of the standard library."""
    modules = _modules(pattern)
    functions = dict.fromkeys(ast.unparse(node) for node in _functions(modules, _LINES))
    return {
        "summarise": [
            f"Summarise the following text in two sentences.\n\n{text}" for text in dict.fromkeys(_paragraphs(modules))
        ],
        "edit": [
            f"Rewrite this Python code with a comment above every statement.\n\n```python\n{text}\n```"
            for text in functions
        ],
    }


def _modules(pattern: str) -> list[ast.Module]:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(library.glob(pattern)) if not _LEFT_OUT & set(file.relative_to(library).parts)]
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def _paragraphs(modules: Sequence[ast.Module]) -> Iterator[str]:
    """The first paragraph of every module's and class's documentation that is of a length to summarise."""
    for module in modules:
        for node in ast.walk(module):
            if not isinstance(node, ast.Module | ast.ClassDef):
                continue
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                words = paragraph.split()
                if _WORDS[0] <= len(words) <= _WORDS[1] and words[-1].endswith("."):
                    yield " ".join(words)
                    break


def _functions(modules: Sequence[ast.Module], lines: tuple[int, int]) -> Iterator[ast.FunctionDef]:
    """The first function of each module of a length between `lines` without documentation."""
    for module in modules:
        plain = (one for one in module.body if isinstance(one, ast.FunctionDef) and ast.get_docstring(one) is None)
        fitting = (one for one in plain if lines[0] <= len(ast.unparse(one).splitlines()) <= lines[1])
        yield from islice(fitting, 1)


if __name__ == "__main__":
    sys.exit(main())
