"""The demo's text: the standard library's sources, a tokenizer, token streams and prompts."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
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
PROMPT_TOKENS = (40, 120)  # inclusive bounds on the length of a prompt
MAX_SHARED_LINES = 0.2  # share of a held-out module's long lines that other modules may hold too
MIN_LINES_LEFT = 5  # a cut leaves at least this many lines, so that the continuation is real code
MAX_SIMILARITY = 0.6  # difflib ratio above which two prompts count as near-duplicates


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
    num_homes = Counter(line for m in modules for line in _long_lines(m))
    eligible = [
        m
        for m in modules
        if len(m.text) >= MIN_HELD_OUT_CHARS
        and len(_starts(m)) >= 3
        and sum(num_homes[line] > 1 for line in _long_lines(m)) <= MAX_SHARED_LINES * len(_long_lines(m))
    ]
    ranked = sorted(eligible, key=lambda module: _hash(module.path))
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


def make_prompts(
    modules: Sequence[Module], tokenizer: PreTrainedTokenizerFast, train_text: str, num: int
) -> list[dict[str, str]]:
    """`num` prompts as {"id": "path:line", "prompt": text}, spread evenly over the modules.

    Each starts at an import block, a function or a class and ends at the end of a line. None occurs in the
    training text, and none resembles another one of the list.
    """
    prompts: list[dict[str, str]] = []
    queues = {module.path: _shuffled_starts(module) for module in modules}
    while len(prompts) < num:
        before = len(prompts)
        for module in modules:
            while len(prompts) < num and queues[module.path]:
                line, last_line = queues[module.path].pop(0)
                text = _cut(module, line, last_line, tokenizer)
                if text is None or text in train_text or any(_similar(text, p["prompt"]) for p in prompts):
                    continue
                prompts.append({"id": f"{module.path}:{line}", "prompt": text})
                break
        if len(prompts) == before:
            raise ValueError(f"modules: {num} prompts wanted, got {before} from {len(modules)} modules")
    return prompts


def write_prompts(path: Path, prompts: Iterable[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _similar(a: str, b: str) -> bool:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() > MAX_SIMILARITY


def _long_lines(module: Module) -> set[str]:
    """Lines long enough that sharing many of them means a copy."""
    return {line.strip() for line in module.text.split("\n") if len(line.strip()) >= 30}


def _starts(module: Module) -> list[tuple[int, int]]:
    """(first line, last line) of the places a prompt may start at, counted from 1."""
    try:
        tree = ast.parse(module.text)
    except (SyntaxError, ValueError):  # lib2to3 and old encodings may hold text this Python does not parse
        return []
    num_lines = module.text.count("\n")
    starts = [(n.lineno, num_lines) for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)][:1]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if (node.end_lineno or first) - first >= 2 * MIN_LINES_LEFT:
                starts.append((first, node.end_lineno or first))
    return starts


def _shuffled_starts(module: Module) -> list[tuple[int, int]]:
    return sorted(_starts(module), key=lambda start: _hash(f"{module.path}:{start}"))


def _cut(module: Module, line: int, last_line: int, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The longest text from `line` that ends a line, leaves some for the continuation and is of a drawn length.

    Without the final newline: byte-level BPE joins it with the next line's indentation into one token.
    """
    low, high = PROMPT_TOKENS
    limit = low + 20 + int(_hash(f"length {module.path}:{line}"), 16) % (high - low - 19)
    lines = module.text.split("\n")
    best = None
    for end in range(line, last_line - MIN_LINES_LEFT + 1):
        text = "\n".join(lines[line - 1 : end])
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        if num_tokens > limit:
            break
        if num_tokens >= low and lines[end - 1].strip():
            best = text
    return best
