"""Token sequences to train on: texts as they are, and prompts that the target continues by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts

_LEAST_TOKENS = 8
"""Shorter sequences teach nothing about longer drafts."""


@dataclass(frozen=True)
class Sequences:
    """Token ids, each sequence at most `window` + 1 long; those held out are at least one."""

    training: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """To train on."""
        return sum(map(len, self.training))

    @property
    def fingerprint(self) -> str:
        """Of the ids to train on."""
        return hashlib.sha256(repr(self.training).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DataOptions:
    """How sequences are made."""

    window: int = 256
    """Tokens of a sequence that are drafted from."""
    new_tokens: int = 128
    """That the target adds to a prompt."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """At each of which a prompt is continued once; 0 is greedy."""
    held_out_share: float = 0.05
    batch: int = 16
    seed: int = 0


def make_sequences(
    model: LayerSkipModel, files: Sequence[Path], options: DataOptions, tell: Callable[[str], None]
) -> Sequences:
    """Of JSONL files the prompts with the target's own continuations, of others the text itself.

    Cost: of prompts, their continuations in batches by the model's own `generate`.
    Raises: ValueError or OSError naming a file that cannot be used, or where there is too little text.
    """
    found: list[tuple[int, ...]] = []
    for file in files:
        ids = _continued(model, file, options, tell) if file.suffix == ".jsonl" else _windows(model, file, options)
        found += [one for one in ids if len(one) >= _LEAST_TOKENS]
    if len(found) < 2:
        raise ValueError(
            f"--data: must hold at least 2 texts of {_LEAST_TOKENS} tokens, got {len(found)} in "
            f"{', '.join(str(file) for file in files)}"
        )
    order = np.random.default_rng(options.seed).permutation(len(found))
    count = max(1, round(options.held_out_share * len(found)))
    chosen = [found[i] for i in order]
    return Sequences(tuple(chosen[count:]), tuple(chosen[:count]))


def _windows(model: LayerSkipModel, file: Path, options: DataOptions) -> Iterator[tuple[int, ...]]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--data: {file} is not UTF-8 text") from None
    ids = model.encode(text) if text.strip() else []
    for start in range(0, len(ids), options.window):
        yield tuple(ids[start : start + options.window + 1])


def _continued(
    model: LayerSkipModel, file: Path, options: DataOptions, tell: Callable[[str], None]
) -> Iterator[tuple[int, ...]]:
    prompts = [encode_prompt(one, model, room=options.new_tokens) for one in read_prompts(file)]
    most = max(1, options.window + 1 - options.new_tokens)
    for temperature in options.temperatures:
        for start in range(0, len(prompts), options.batch):
            some = [ids[-most:] for ids in prompts[start : start + options.batch]]
            yield from _continue(model, some, temperature, options)
            tell(
                f"{start + len(some)} of {len(prompts)} prompts of {file.name} continued at temperature {temperature:g}"
            )


@torch.inference_mode()
def _continue(
    model: LayerSkipModel, prompts: Sequence[Sequence[int]], temperature: float, options: DataOptions
) -> Iterator[tuple[int, ...]]:
    """The target's own text after each prompt, side by side."""
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        torch.manual_seed(options.seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    target: Any = model.model
    out = target.generate(
        rows, attention_mask=mask, max_new_tokens=options.new_tokens, pad_token_id=0, use_cache=True, **sampling
    )
    ends = model.eos_token_ids
    for ids, row in zip(prompts, out.tolist(), strict=True):
        new = row[longest:]
        stop = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        yield (*ids, *new[:stop])
