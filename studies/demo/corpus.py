"""The demo's text: the standard library's sources, a tokenizer and token streams."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
EXCLUDED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__phello__", "pydoc_data", "_bundled"}
# Generated tables: thousands of near-identical lines that teach nothing about code.
EXCLUDED_NAMES = re.compile(r"^(test_.*|_sysconfigdata.*|_casefix|stringprep|entities|keysym.*)\.py$")
TABLE_MARKERS = ("decoding_table = (", "decoding_map = codecs.make_identity_dict")
MIN_HELD_OUT_CHARS = 6_000
MAX_SHARED_LINES = 0.2  # share of a held-out module's long lines that other modules may hold too
MIN_LINES_LEFT = 5  # a cut leaves at least this many lines, so that the continuation is real code


@dataclass(frozen=True)
class Module:
    """One source file: its path below the standard library's root, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Split:
    """Whole modules, each in exactly one part."""

    train: tuple[Module, ...]
    tuning: tuple[Module, ...]
    held_out: tuple[Module, ...]

    def fingerprint(self) -> str:
        """Hash of every path and text in order: a resumed run must see the same corpus."""
        digest = hashlib.sha256()
        for part in (self.train, self.tuning, self.held_out):
            for module in part:
                digest.update(f"{module.path}\0{module.text}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


def read_modules(root: Path | None = None) -> list[Module]:
    """The library's own modules below `root` (default: the running interpreter's), sorted, without tests and copies."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    modules, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        in_build_dir = any(part.startswith("config-") for part in relative.parts[:-1])
        if in_build_dir or EXCLUDED_DIRS & set(relative.parts[:-1]) or EXCLUDED_NAMES.match(path.name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or text in seen or any(marker in text for marker in TABLE_MARKERS):
            continue
        seen.add(text)
        modules.append(Module(relative.as_posix(), text))
    return modules


def split_modules(modules: Sequence[Module], *, num_tuning: int = 20, num_held_out: int = 20) -> Split:
    """Hold whole modules out, ranked by their paths' hashes; never one that largely repeats others."""
    num_homes = Counter(line for m in modules for line in long_lines(m.text))
    eligible = [
        m
        for m in modules
        if len(m.text) >= MIN_HELD_OUT_CHARS
        and len(starts(m)) >= 3
        and sum(num_homes[line] > 1 for line in long_lines(m.text)) <= MAX_SHARED_LINES * len(long_lines(m.text))
    ]
    ranked = sorted(eligible, key=lambda module: hash_of(module.path))
    tuning, held_out = ranked[:num_tuning], ranked[num_tuning : num_tuning + num_held_out]
    if len(held_out) < num_held_out:
        raise ValueError(f"modules: at least {num_tuning + num_held_out} must be long enough, got {len(eligible)}")
    out = {m.path for m in tuning + held_out}
    return Split(tuple(m for m in modules if m.path not in out), tuple(tuning), tuple(held_out))


def train_tokenizer(modules: Iterable[Module], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the modules: any text survives a round trip, and nothing is added around it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m.text for m in modules), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, modules: Iterable[Module]) -> torch.Tensor:
    """All modules in a row, each followed by end-of-text. Shape (tokens,) int64."""
    ids: list[int] = []
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # a saved tokenizer may bring padding along, which here would be taken for text
    for encoding in backend.encode_batch([m.text for m in modules]):
        ids.extend(encoding.ids)
        ids.append(int(tokenizer.eos_token_id))
    return torch.tensor(ids, dtype=torch.int64)


def hash_of(text: str) -> str:
    """What decides where nothing else does: the same on every machine, and no order of the sources."""
    return hashlib.sha256(text.encode()).hexdigest()


def long_lines(text: str) -> set[str]:
    """Lines long enough that sharing many of them means a copy."""
    return {line.strip() for line in text.split("\n") if len(line.strip()) >= 30}


def starts(module: Module) -> list[tuple[int, int]]:
    """(first line, last line) of an import block, of functions and of classes, counted from 1."""
    try:
        tree = ast.parse(module.text)
    except (SyntaxError, ValueError):  # lib2to3 and old encodings may hold text this Python does not parse
        return []
    num_lines = module.text.count("\n")
    found = [(n.lineno, num_lines) for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)][:1]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = first_line(node)
            if (node.end_lineno or first) - first >= 2 * MIN_LINES_LEFT:
                found.append((first, node.end_lineno or first))
    return found


def first_line(node: ast.stmt) -> int:
    """Where a statement starts, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
