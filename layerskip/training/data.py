"""Token sequences to train on: texts as they are, and prompts that the target continues by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts
from layerskip.training.continuations import Continuations, Ids, own_prompts

_LEAST_TOKENS = 8
"""Shorter sequences teach nothing about longer drafts."""
_OWN_PROMPT_TOKENS = 64
"""Of a prompt that the model thinks of; a batch waits for its longest."""


@dataclass(frozen=True)
class Text:
    """Token ids, of which the first `given` are a prompt's: drafts are learnt and judged after those."""

    ids: Ids
    given: int = 0


@dataclass(frozen=True)
class Sequences:
    """Texts of at most `window` + 1 tokens; those held out are at least one, and of other prompts."""

    training: tuple[Text, ...]
    held_out: tuple[Text, ...]

    @property
    def num_tokens(self) -> int:
        """To train on, prompts included."""
        return sum(len(one.ids) for one in self.training)

    @property
    def fingerprint(self) -> str:
        """Of the texts to train on."""
        every = [(one.ids, one.given) for one in self.training]
        return hashlib.sha256(repr(every).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DataOptions:
    """How sequences are made."""

    window: int = 256
    """Tokens of a sequence that are drafted from."""
    new_tokens: int = 128
    """That the target adds to a prompt."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """At each of which a prompt is continued once; 0 is greedy."""
    own_prompts: int = 0
    """That the target is to think of itself; see `continuations.own_prompts`."""
    held_out_share: float = 0.05
    batch: int = 128
    """Prompts continued side by side."""
    seed: int = 0


def make_sequences(
    model: LayerSkipModel, files: Sequence[Path], folder: Path, options: DataOptions, tell: Callable[[str], None]
) -> Sequences:
    """Of JSONL files the prompts with the target's own continuations, of others the text itself; own prompts like those
    of files. Continuations are kept in `folder`, see `Continuations`.

    Raises: ValueError or OSError naming a file that cannot be used, or where there is too little text.
    """
    continuations = Continuations(model, folder, options.batch, options.seed)
    groups = [[one] for file in files if file.suffix != ".jsonl" for one in _windows(model, file, options)]
    prompts = [
        (str(file), [encode_prompt(one, model, room=options.new_tokens) for one in read_prompts(file)])
        for file in files
        if file.suffix == ".jsonl"
    ]
    if options.own_prompts:
        own = own_prompts(
            continuations,
            model,
            options.own_prompts,
            _OWN_PROMPT_TOKENS,
            lambda done: tell(f"{done} of {options.own_prompts} prompts thought of"),
        )
        prompts.append(("--own-prompts", own))
    for name, some in prompts:
        groups += _continued(continuations, name, some, options, tell)
    kept = ([one for one in group if len(one.ids) >= max(_LEAST_TOKENS, one.given + 1)] for group in groups)
    found = [group for group in kept if group]
    if len(found) < 2:
        raise ValueError(
            f"--data: must hold at least 2 texts or prompts of {_LEAST_TOKENS} tokens, got {len(found)} in "
            f"{', '.join([*map(str, files), *(['--own-prompts'] if options.own_prompts else [])])}"
        )
    order = np.random.default_rng(options.seed).permutation(len(found))
    count = max(1, round(options.held_out_share * len(found)))
    held_out, training = (tuple(one for i in part for one in found[i]) for part in (order[:count], order[count:]))
    return Sequences(training, held_out)


def _windows(model: LayerSkipModel, file: Path, options: DataOptions) -> Iterator[Text]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--data: {file} is not UTF-8 text") from None
    ids = model.encode(text) if text.strip() else []
    for start in range(0, len(ids), options.window):
        yield Text(tuple(ids[start : start + options.window + 1]))


def _continued(
    continuations: Continuations,
    name: str,
    prompts: Sequence[Ids],
    options: DataOptions,
    tell: Callable[[str], None],
) -> list[list[Text]]:
    """Each prompt's continuations."""
    most = max(1, options.window + 1 - options.new_tokens)
    ends = sorted((ids[-most:] for ids in prompts), key=len)  # those side by side alike in length
    found: list[list[Text]] = [[] for _ in ends]
    for temperature in options.temperatures:

        def told(done: int, temperature: float = temperature) -> None:
            tell(f"{done} of {len(ends)} prompts of {name} continued at temperature {temperature:g}")

        new = continuations.of(ends, temperature, options.new_tokens, told)
        for group, ids, more in zip(found, ends, new, strict=True):
            group.append(Text(ids + more, len(ids)))
    return found
