"""The proving ground's texts: sources, documentation, and sentences in no order, all from Python's own library.

So a machine with this Python makes the same text without a download. Whole documents belong to training, to the tuning
prompts, or to the prompts that no search sees.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from studies.demo.corpus import Module, hash_of, read_modules, token_stream, train_tokenizer

VOCABULARY = 2048
PROMPT_TOKENS = 48
_MAX_TRAINING_CHARS = 5_000_000
_MIN_CHARS = 400
"""Of a document."""
_SENTENCES_A_DOCUMENT = 24
_TUNING, _REPORTING = 0, 1
_NUM_PARTS = 12
"""One part in so many is of tuning prompts, one of the others."""


@dataclass(frozen=True)
class Documents:
    """A text's documents, each in one part alone."""

    training: tuple[str, ...]
    tuning: tuple[str, ...]
    reporting: tuple[str, ...]

    @classmethod
    def split(cls, documents: Iterable[str]) -> Documents:
        """By the documents' hashes, so that a further document moves no other one."""
        parts: list[list[str]] = [[], [], []]
        for one in sorted(set(documents), key=hash_of):
            part = int(hash_of(one)[:8], 16) % _NUM_PARTS
            parts[part if part in (_TUNING, _REPORTING) else 2].append(one)
        training, num_chars = [], 0
        for one in parts[2]:
            if num_chars < _MAX_TRAINING_CHARS:
                training.append(one)
                num_chars += len(one)
        return cls(tuple(training), tuple(parts[_TUNING]), tuple(parts[_REPORTING]))


def _sources() -> list[str]:
    return [module.text for module in read_modules()]


@cache
def _docstrings() -> tuple[str, ...]:
    """Those of each module in a row, and the topics of pydoc."""
    from pydoc_data.topics import topics

    found = [text for text in topics.values() if len(text) >= _MIN_CHARS]
    for source in _sources():
        text = "\n\n".join(_docstrings_of(source))
        if len(text) >= _MIN_CHARS:
            found.append(text)
    return tuple(found)


def _docstrings_of(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _sentences() -> list[str]:
    """Sentences of the documentation, each once, in no order: what follows one has no bearing on it."""
    found: set[str] = set()
    for text in _docstrings():
        flat = re.sub(r"\s+", " ", text)
        found.update(one for one in re.findall(r"(?:(?<=\. )|^)([A-Z][a-z][^.!?]{30,200}\.)", flat) if ">>>" not in one)
    ordered = sorted(found, key=hash_of)
    rows = range(0, len(ordered), _SENTENCES_A_DOCUMENT)
    return ["\n".join(ordered[row : row + _SENTENCES_A_DOCUMENT]) for row in rows]


TEXTS: dict[str, Callable[[], Sequence[str]]] = {"python": _sources, "prose": _docstrings, "sentences": _sentences}


class Text:
    """One text with its tokenizer, which is trained once and then read from its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.documents = Documents.split(TEXTS[name]())
        place = folder / f"tokenizer_{name}"
        if not place.exists():
            train_tokenizer(_modules(self.documents.training), VOCABULARY).save_pretrained(place)
        self.tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(place)

    @property
    def stream(self) -> torch.Tensor:
        """The training documents' tokens."""
        return token_stream(self.tokenizer, _modules(self.documents.training))

    @property
    def fingerprint(self) -> str:
        """Of everything that is trained on."""
        return hash_of("\0".join(self.documents.training))[:16]

    def prompts(self, documents: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Windows of documents, endless in number for these purposes: one of every document, then another of each."""
        for turn in range(16):
            for document in documents:
                ids = self.tokenizer.backend_tokenizer.encode(document).ids
                room = len(ids) - PROMPT_TOKENS
                if room > turn:
                    start = int(hash_of(f"{turn} {document}")[:8], 16) % room
                    yield tuple(ids[start : start + PROMPT_TOKENS])


def _modules(documents: Iterable[str]) -> list[Module]:
    return [Module(str(i), text) for i, text in enumerate(documents)]
