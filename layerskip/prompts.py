"""Prompts from JSONL, one object a line: read, checked, and made into token ids."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, ValidationError

from layerskip.config.sampling_params import asks_to_sample
from layerskip.config.strict_json import parse_json, printable
from layerskip.config.validated import Frozen, describe_validation_error

LOG = logging.getLogger(__name__)

MAX_LINE_CHARS = 4_000_000


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError(f"must hold more than white space, got {text[:80]!r}")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_not_blank)]


class _Request(Frozen):
    """A line with how tokens were chosen for it, in the words of the server's API."""

    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """0 is greedy; above 0 samples."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; empty where the line says nothing."""
        given = {name: getattr(self, name) for name in _Request.model_fields}
        given["temperature"] = self.temperature or None  # greedy ignores it, and its own 0 would be refused
        given["do_sample"] = asks_to_sample(self.temperature, self.top_p, self.top_k, self.min_p)
        return {name: value for name, value in given.items() if value is not None}


class _Message(Frozen):
    role: Text
    content: Text


class _Plain(_Request):
    prompt: Text
    id: str | int | None = None
    category: str | None = None


class _Chat(_Request):
    messages: Annotated[list[_Message], Field(min_length=1)]
    id: str | int | None = None
    category: str | None = None


class _SpecBench(Frozen):
    question_id: str | int
    category: str
    turns: Annotated[list[Text], Field(min_length=1)]
    reference: Any = None
    """Answers of several shapes, which nothing here reads."""


_SHAPES: dict[str, type[_Plain] | type[_Chat] | type[_SpecBench]] = {
    "prompt": _Plain,
    "messages": _Chat,
    "turns": _SpecBench,
}


@dataclass(frozen=True)
class Prompt:
    """One prompt before tokenising, and where it stands."""

    prompt_id: str
    group: str | None
    """What its record says; None if that is no name for a group."""
    kind: Literal["text", "chat", "turn"]
    messages: tuple[tuple[str, str], ...]
    """(role, content); for `text` and `turn` one message from `user`."""
    source: str
    """`file:line`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How its tokens are chosen, as fields of `SamplingParams`, where its record says."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content: the same text in another file, under another id, is the same prompt."""
        content = json.dumps([list(message) for message in self.messages])  # ASCII alone
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def identity(self) -> tuple[str, str]:
        """Content and kind, by which prompts are the same: a chat is not decoded as the same words in plain text."""
        return self.fingerprint, self.kind


class Encoder(Protocol):
    """What tokenising needs of a model."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_positions(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...


class GroupReader(Protocol):
    """Where a record names the group of its prompt."""

    @property
    def field(self) -> str: ...
    def read(self, record: Mapping[str, Any], source: str) -> str | None: ...


def read_prompts(path: str | os.PathLike[str], grouping: GroupReader | None = None) -> tuple[Prompt, ...]:
    """Every prompt of a JSONL file; blank lines are skipped, each other line has one of the three shapes.

    Beside the shape's own fields a line may have the one that `grouping` reads; without it no prompt has a group.
    Of a prompt that stands there several times, as in logs of requests, the first line counts, its settings too; how
    many repeat others is a warning.

    Raises: ValueError naming file and line, FileNotFoundError if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such prompt file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None
    prompts: dict[tuple[str, str], Prompt] = {}
    places: dict[str, str] = {}
    num_repeats = 0
    # Not splitlines(): JSON strings may hold U+2028 and friends unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse_line(line, f"{path}:{number}", grouping)
        if prompt.identity in prompts:
            num_repeats += 1
            continue
        if prompt.prompt_id in places:
            raise ValueError(f"{prompt.source}: repeats the id of {places[prompt.prompt_id]}, {prompt.prompt_id!r}")
        places[prompt.prompt_id] = prompt.source
        prompts[prompt.identity] = prompt
    if not prompts:
        raise ValueError(f"{path}: has no prompts")
    if num_repeats:
        LOG.warning("%s: left out %d prompts that repeat earlier ones, %d stay", path, num_repeats, len(prompts))
    return tuple(prompts.values())


def encode_prompt(prompt: Prompt, model: Encoder, *, room: int) -> tuple[int, ...]:
    """Token ids of a prompt; a chat through the tokenizer's chat template.

    `room` is how many positions decoding needs after the prompt (new tokens and the draft's lead).
    Raises: ValueError naming file and line if it does not fit, encodes to nothing or needs a missing template.
    """
    ids = tuple(_encode(prompt, model))
    if not ids:
        raise ValueError(f"{prompt.source}: prompt encodes to no tokens")
    if model.max_positions is not None and len(ids) + room > model.max_positions:
        raise ValueError(
            f"{prompt.source}: {len(ids)} prompt tokens + {room} to decode do not fit the model's "
            f"{model.max_positions} positions"
        )
    return ids


def _encode(prompt: Prompt, model: Encoder) -> Sequence[int]:
    tokenizer = model.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt.kind == "text" or (prompt.kind == "turn" and not has_template):
        return model.encode(prompt.messages[0][1])
    if not has_template:
        raise ValueError(f"{prompt.source}: a chat prompt needs a chat template, which the model's tokenizer has not")
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # noqa: BLE001 (a template is somebody's program and may raise anything)
        first_line = str(error).splitlines()[:1]
        raise ValueError(f"{prompt.source}: the chat template refuses it: {' '.join(first_line)}") from None
    # The template has written the special tokens already.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _parse_line(line: str, source: str, grouping: GroupReader | None) -> Prompt:
    if len(line) > MAX_LINE_CHARS:
        raise ValueError(f"{source}: a line has at most {MAX_LINE_CHARS} characters, got {len(line)}")
    try:
        data = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{source}: must be a JSON object, got {type(data).__name__}")
    named = [name for name in _SHAPES if name in data]
    if len(named) != 1:
        got = ", ".join(printable(name) for name in sorted(data)[:9]) or "none"
        raise ValueError(f"{source}: must have exactly one of the fields prompt, messages, turns; got fields: {got}")
    kind = _SHAPES[named[0]]
    group_field = None if grouping is None else grouping.field
    try:
        shape = kind(**{name: data[name] for name in data if name in kind.model_fields or name != group_field})
    except ValidationError as error:
        raise ValueError(f"{source}: {describe_validation_error(error)}") from None
    group = None if grouping is None else grouping.read(data, source)
    return _to_prompt(shape, group, source)


def _to_prompt(shape: _Plain | _Chat | _SpecBench, group: str | None, source: str) -> Prompt:
    if isinstance(shape, _SpecBench):
        return Prompt(str(shape.question_id), group, "turn", (("user", shape.turns[0]),), source)
    path, _, line = source.rpartition(":")
    prompt_id = f"{Path(path).stem}-{line}" if shape.id is None else str(shape.id)
    if isinstance(shape, _Chat):
        messages = tuple((message.role, message.content) for message in shape.messages)
        return Prompt(prompt_id, group, "chat", messages, source, shape.settings)
    return Prompt(prompt_id, group, "text", (("user", shape.prompt),), source, shape.settings)
