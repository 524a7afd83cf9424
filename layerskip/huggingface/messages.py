"""A chat answer as it comes, as the parts of a message, by Transformers' own parser of what models write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from layerskip.config.strict_json import parse_json

_THOUGHTS = ("reasoning_content", "thinking")
"""What templates call what a model says to itself."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants called."""

    index: int
    """Among those of the answer."""
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text that the model says to itself."""

    text: str


Part = Said | Thought | ToolCall


def response_template(tokenizer: Any, model_type: str) -> Mapping[str, Any] | None:
    """How this model writes thoughts and calls of tools: as its tokenizer says, else as Transformers knows of models of
    this type; None where neither does."""
    own: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own
    # Only here: it is Transformers' own server, and a module that few of ours need.
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as KNOWN

    return next((template for types, template in KNOWN.items() if model_type in types), None)


def read_template(file: Path) -> Mapping[str, Any]:
    """The response template in a JSON file. Raises: ValueError that names the file, OSError."""
    try:
        template = parse_json(file.read_text(encoding="utf-8"))
        MessageParser(template, "", [], most_calls=None)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{file}: must be the JSON of a response template: {' '.join(str(error).split())}") from None
    return dict(template)


class MessageParser:
    """Makes parts of text as it comes; the text has the special tokens that part it.

    What is no call as the template has them, because it was cut off or is no JSON, is said as it stands.
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]], *, most_calls: int | None
    ) -> None:
        """prompt: the text before, of which templates write a part of the answer; tools: as the chat template got them;
        most_calls: after so many the answer says no more.

        Raises: ValueError, TypeError or else for a template that is none.
        """
        own = dict(template), list(tools)
        self._parser: ResponseParser | None = ResponseParser(own[0], prefix="", tools=own[1])
        with suppress(Exception):  # a prompt, too, may hold anything
            self._parser = ResponseParser(own[0], prefix=prompt, tools=own[1])
        self._most_calls = most_calls
        self._unread = ""
        """Of a call that is not complete."""
        self._is_blank = True
        """Whether nothing was said yet; blanks before it are left out."""
        self.num_calls = 0

    def push(self, text: str) -> Iterator[Part]:
        """The parts that this text completes."""
        if self._parser is None:
            yield from self._said(text)
            return
        try:
            parts = list(self._parts(self._parser.feed(text)))
        except Exception:  # noqa: BLE001 (a template is somebody's program, and what a model writes is anything)
            parts = self._give_up(text)
        yield from parts

    def finish(self) -> Iterator[Part]:
        """What was held back."""
        if self._parser is None:
            return
        try:
            parts = list(self._parts(self._parser.finalize()[1]))
        except Exception:  # noqa: BLE001 (as above)
            parts = self._give_up("")
        yield from parts

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_chunk" and event["dirty"]:
                self._unread += event["text"]
            elif kind == "region_chunk" and name in _THOUGHTS:
                yield Thought(event["text"])
            elif kind == "region_chunk" and name == "content":
                yield from self._said(event["text"])
            elif kind == "region_close" and name == "tool_calls":
                yield from self._called(event["value"])

    def _called(self, value: Mapping[str, Any]) -> Iterator[ToolCall]:
        function = value["function"]
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str):
            raise TypeError(f"name: must be text, got {name!r}")
        self._unread = ""
        if self._most_calls is None or self.num_calls < self._most_calls:
            told = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield ToolCall(self.num_calls, name, told)
            self.num_calls += 1

    def _said(self, text: str) -> Iterator[Said]:
        if self._is_blank:
            text = text.lstrip()
        if text and (self._most_calls is None or self.num_calls < self._most_calls):
            self._is_blank = False
            yield Said(text)

    def _give_up(self, text: str) -> list[Part]:
        """Everything from here on is said as it stands."""
        self._parser, unread, self._unread = None, self._unread, ""
        return list(self._said(unread + text))
