"""Text that the target writes itself: after given prompts, and prompts of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from layerskip.model import LayerSkipModel
from layerskip.prompts import Prompt, encode_prompt

FILE_NAME = "continuations.jsonl"
_MARK = "\u2042"
"""Stands for what a user says where a chat template is asked what comes before it."""

Ids = tuple[int, ...]


class Continuations:
    """The target's own text after prompts, in batches by the model's own `generate`.

    Every batch is a line of the folder's `continuations.jsonl`, where it is looked up before it is made: a training
    that was stopped, or is done again with other options, need not wait for them again.
    """

    def __init__(self, model: LayerSkipModel, folder: Path, batch: int, seed: int) -> None:
        self._model, self._file, self._batch, self._seed = model, folder / FILE_NAME, batch, seed
        self._known = _read(self._file)

    def of(
        self, prompts: Sequence[Ids], temperature: float, new_tokens: int, tell: Callable[[int], None]
    ) -> Iterator[Ids]:
        """Each prompt's, without it, up to the first end of text. temperature: 0 is greedy. tell: after every batch,
        with how many prompts are done."""
        for start in range(0, len(prompts), self._batch):
            some = prompts[start : start + self._batch]
            what = (self._model.weights_fingerprint(), some, temperature, new_tokens, self._seed, start)
            key = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
            if key not in self._known:
                self._known[key] = self._make(some, temperature, new_tokens, self._seed + start)
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self._known[key]]) + "\n")
            yield from self._known[key]
            tell(start + len(some))

    @torch.inference_mode()
    def _make(self, prompts: Sequence[Ids], temperature: float, new_tokens: int, seed: int) -> list[Ids]:
        longest, device = max(map(len, prompts)), self._model.device
        rows = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        target: Any = self._model.model
        out = target.generate(
            rows, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, use_cache=True, **sampling
        )
        return [self._text(row[longest:]) for row in out.tolist()]

    def _text(self, new: Sequence[int]) -> Ids:
        ends = self._model.eos_token_ids
        return tuple(new[: next((i + 1 for i, token in enumerate(new) if token in ends), len(new))])


def own_prompts(
    continuations: Continuations, model: LayerSkipModel, count: int, longest: int, tell: Callable[[int], None]
) -> list[Ids]:
    """What the model says in its user's place: up to `count` prompts, sampled after what its chat template writes
    before a user's message, as in Magpie (2406.08464). Repeated ones are left out, and those that do not end within
    `longest` tokens.

    Raises: ValueError where the tokenizer has no chat template.
    """
    before = _before_user(model)
    prompts: dict[Ids, None] = {}
    for ids in continuations.of([before] * count, 1.0, longest, tell):
        text = model.tokenizer.decode(ids, skip_special_tokens=True).strip()
        if ids and ids[-1] in model.eos_token_ids and text:
            prompt = Prompt("own", None, "chat", (("user", text),), "--own-prompts")
            prompts[encode_prompt(prompt, model, room=1)] = None
    return list(prompts)


def _before_user(model: LayerSkipModel) -> Ids:
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError(
            "--own-prompts: needs a tokenizer with a chat template; give texts or prompts in --data instead"
        )
    messages = [{"role": "user", "content": _MARK}]
    before, mark, _ = model.tokenizer.apply_chat_template(messages, tokenize=False).partition(_MARK)
    if not mark:
        raise ValueError("--own-prompts: the chat template does not write what a user says as it is")
    return tuple(model.tokenizer(before, add_special_tokens=False)["input_ids"])


def _read(file: Path) -> dict[str, list[Ids]]:
    """What earlier runs made; a line that was cut short is dropped, and made again."""
    found: dict[str, list[Ids]] = {}
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        for line in whole.splitlines():
            with suppress(ValueError):
                key, rows = json.loads(line)
                found[key] = [tuple(row) for row in rows]
        if whole != text:
            file.write_text(whole, encoding="utf-8")
    return found
