"""Choose the demo's prompts, of two categories, from modules held out: `python -m studies.demo.make_prompts --help`."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from layerskip.command_line.cli import OneLineParser, quiet_libraries, run_command
from studies.demo.corpus import (
    MAX_SHARED_LINES,
    MIN_LINES_LEFT,
    Module,
    Split,
    first_line,
    hash_of,
    long_lines,
    read_modules,
    split_modules,
    starts,
    token_stream,
)

PROG = "studies.demo.make_prompts"
HERE = Path(__file__).resolve().parent
NUM_PROMPTS = {"tuning": 24, "held_out": 52}  # of each category, by part
OPENS_TOKENS = (40, 120)  # inclusive bounds on the length of a prompt, here and below
CONTINUES_TOKENS = (100, 300)
NUM_NEXT = 48  # tokens of the source after a prompt by which `continues` is judged
NGRAM = 4
MIN_REPEATED = 0.5  # least share of those tokens that end an n-gram of the prompt
MAX_SIMILARITY = 0.6  # difflib ratio above which two prompts count as near-duplicates
_NEXT_CHARS = 4_000  # more than `NUM_NEXT` tokens take


@dataclass(frozen=True)
class Excerpt:
    """A prompt and where it stands; lines are counted from 1, and `last` is of the tokens after a `continues`."""

    category: str
    path: str
    first: int
    last: int
    text: str

    def overlaps(self, other: Excerpt) -> bool:
        """Whether the two have a line of their module in common."""
        return self.path == other.path and self.first <= other.last and other.first <= self.last

    def as_record(self) -> dict[str, str]:
        """Its line of the JSONL file."""
        return {"id": f"{self.path}:{self.first}", "category": self.category, "prompt": self.text}


class Chooser:
    """Chooses prompts in turn, none of which is in the training text or like one chosen before.

    Everything is decided by the sources and the tokenizer: no model has a say.
    """

    def __init__(self, train: Iterable[Module], tokenizer: PreTrainedTokenizerFast) -> None:
        train = list(train)
        self._train_text = "\n".join(module.text for module in train)
        self._lines_elsewhere: set[str] = set()
        self._tokenizer = tokenizer
        self._chosen: list[Excerpt] = []
        self.leave(train)

    def leave(self, modules: Iterable[Module]) -> None:
        """A part is done with: what `continues` in other parts holds few of its lines."""
        for module in modules:
            self._lines_elsewhere |= long_lines(module.text)

    def opens(self, modules: Sequence[Module], num: int) -> list[Excerpt]:
        """`num` first lines of an import block, a function or a class, spread evenly over the modules."""
        return self._choose(modules, num, self._opens_of)

    def continues(self, modules: Sequence[Module], num: int) -> list[Excerpt]:
        """`num` texts from a statement on, which the source goes on from with what they hold: a table, a run of
        like statements, methods or branches. Likewise spread, and no line of them is another prompt's."""
        return self._choose(modules, num, self._continues_of)

    def _choose(
        self, modules: Sequence[Module], num: int, excerpts_of: Callable[[Module], Iterator[Excerpt]]
    ) -> list[Excerpt]:
        found: list[Excerpt] = []
        queues = [excerpts_of(module) for module in modules]
        while queues and len(found) < num:
            for queue in list(queues):
                excerpt = next((one for one in queue if self._is_new(one)), None)
                if excerpt is None:
                    queues.remove(queue)
                elif len(found) < num:
                    found.append(excerpt)
                    self._chosen.append(excerpt)
        if len(found) < num:
            raise ValueError(f"modules: {num} prompts wanted, got {len(found)} from {len(modules)} modules")
        return found

    def _opens_of(self, module: Module) -> Iterator[Excerpt]:
        for line, last_line in sorted(starts(module), key=lambda start: hash_of(f"{module.path}:{start}")):
            text = self._cut(module, line, last_line, OPENS_TOKENS)
            if text is not None:
                yield Excerpt("opens", module.path, line, line + text.count("\n"), text)

    def _continues_of(self, module: Module) -> Iterator[Excerpt]:
        lines = module.text.split("\n")
        statements = {first_line(node) for node in ast.walk(ast.parse(module.text)) if isinstance(node, ast.stmt)}
        for line in sorted(statements, key=lambda line: hash_of(f"continues {module.path}:{line}")):
            text = self._cut(module, line, len(lines), CONTINUES_TOKENS)
            if text is None or self._is_elsewhere(text):
                continue
            ids = self._encode(text)
            rest = "\n".join(lines[line - 1 + text.count("\n") + 1 :])[:_NEXT_CHARS]
            following = self._encode(f"{text}\n{rest}")[len(ids) :][:NUM_NEXT]
            if len(following) == NUM_NEXT and repeated_share(ids, following) >= MIN_REPEATED:
                last = line + (text + self._tokenizer.decode(following)).count("\n")
                yield Excerpt("continues", module.path, line, last, text)

    def _is_new(self, one: Excerpt) -> bool:
        if one.text in self._train_text or any(one.overlaps(other) for other in self._chosen):
            return False
        return not any(is_similar(one.text, other.text) for other in self._chosen)

    def _is_elsewhere(self, text: str) -> bool:
        lines = long_lines(text)
        return len(lines & self._lines_elsewhere) > MAX_SHARED_LINES * len(lines)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut(self, module: Module, line: int, last_line: int, bounds: tuple[int, int]) -> str | None:
        """The longest text from `line` that ends a line, leaves some for the continuation and is of a drawn length.

        Without the final newline: byte-level BPE joins it with the next line's indentation into one token.
        """
        low, high = bounds
        limit = low + 20 + int(hash_of(f"length {module.path}:{line}"), 16) % (high - low - 19)
        lines = module.text.split("\n")
        best = None
        for end in range(line, last_line - MIN_LINES_LEFT + 1):
            text = "\n".join(lines[line - 1 : end])
            num_tokens = len(self._encode(text))
            if num_tokens > limit:
                break
            if num_tokens >= low and lines[end - 1].strip():
                best = text
        return best


def repeated_share(prompt: Sequence[int], following: Sequence[int]) -> float:
    """Share of the `following` tokens that, with the tokens just before them, make an n-gram of the prompt.

    It is what a lookup of n - 1 tokens in the prompt could propose, were the text to go on as the source does.
    """
    ids = [*prompt, *following]
    ngrams = {tuple(prompt[start : start + NGRAM]) for start in range(len(prompt) - NGRAM + 1)}
    ends = range(len(prompt) + 1, len(ids) + 1)
    return sum(tuple(ids[end - NGRAM : end]) in ngrams for end in ends) / len(following)


def is_similar(a: str, b: str) -> bool:
    """Whether two prompts are near-duplicates."""
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    # All but the last are cheap upper bounds of it.
    ratios = (matcher.real_quick_ratio, matcher.quick_ratio, lambda: most_alike(a, b), matcher.ratio)
    return all(ratio() > MAX_SIMILARITY for ratio in ratios)


def most_alike(a: str, b: str) -> float:
    """What difflib's ratio is at most: by the longest common subsequence, which no sum of its blocks is longer than.

    A bit for each character of `a`, a row of the usual table at a time (Hyyrö, 2004). Cost: some tenths of a
    millisecond for two prompts.
    """
    everything = (1 << len(a)) - 1
    places: dict[str, int] = {}
    for place, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << place
    row = everything
    for character in b:
        both = row & places.get(character, 0)
        row = (row + both | row - both) & everything
    return 2 * (len(a) - row.bit_count()) / (len(a) + len(b))


def make_prompts(
    split: Split, tokenizer: PreTrainedTokenizerFast, num_prompts: Mapping[str, int] = NUM_PROMPTS
) -> dict[str, list[dict[str, str]]]:
    """The records of both parts, `num_prompts` of each category. The categories take turns, so that the first few
    prompts of a file, which is all that a trial or a short benchmark decodes, are of both."""
    chooser = Chooser(split.train, tokenizer)
    prompts = {}
    for part, num in num_prompts.items():
        modules: Sequence[Module] = getattr(split, part)
        pairs = zip(chooser.opens(modules, num), chooser.continues(modules, num), strict=True)
        prompts[part] = [excerpt.as_record() for pair in pairs for excerpt in pair]
        chooser.leave(modules)
    return prompts


def write_prompts(path: Path, prompts: Iterable[Mapping[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8")


def check_split(split: Split, facts: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises: ValueError unless the model that training.json's `facts` are of was trained on this split."""
    for part in NUM_PROMPTS:
        if [module.path for module in getattr(split, part)] != facts[f"{part}_modules"]:
            raise ValueError(f"corpus: must hold out the model's own {part} modules, got others")
    if (num_tokens := len(token_stream(tokenizer, split.train))) != facts["corpus_tokens"]:
        expected = f"the {facts['corpus_tokens']} tokens that the model was trained on (Python {facts['python']})"
        raise ValueError(f"corpus: must have {expected}, got {num_tokens}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Write tuning.jsonl and held_out.jsonl for a trained model, from modules that it was not trained "
        "on: some ninety seconds on one core. Exit codes: 0 done, 2 bad input.",
    )
    add = parser.add_argument
    add("--model", type=Path, default=HERE / "model", help="folder of tokenizer and training.json [studies/demo/model]")
    add("--corpus", type=Path, help="folder of the Python sources it was trained on [the interpreter's library]")
    add("--out", type=Path, default=HERE, help="folder to write to [studies/demo]")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the prompts; returns the exit code."""
    args = parse(argv)
    return run_command(PROG, lambda: make(args))


def make(args: argparse.Namespace) -> int:
    """What `main` does. Raises: ValueError or OSError in one line for bad input."""
    quiet_libraries()
    split = split_modules(read_modules(args.corpus))
    facts = json.loads((args.model / "training.json").read_text(encoding="utf-8"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    check_split(split, facts, tokenizer)
    for part, prompts in make_prompts(split, tokenizer).items():
        write_prompts(args.out / f"{part}.jsonl", prompts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
