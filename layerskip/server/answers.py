"""Answers in OpenAI's JSON: whole, and as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from layerskip.huggingface.messages import MessageParser, Part, Said, Thought, ToolCall
from layerskip.server.logprobs import Entry, of_chat, of_completion
from layerskip.server.schemas import GenerationFields
from layerskip.server.worker import Finished, Piece

DONE = b"data: [DONE]\n\n"
_NOTHING = Piece("", [])
"""No tokens."""


class CompletionShape:
    """Where /v1/completions puts the text of a choice."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Of a whole answer."""
        return {"text": _text_of(parts, Said)}

    def chunk(self, part: Part | None) -> dict[str, Any]:
        """Of an event; None ends the answer."""
        return {"text": part.text if isinstance(part, Said) else ""}

    def opening(self) -> dict[str, Any] | None:
        """What comes before the first text of a stream."""
        return None

    def logprobs(self, entries: Sequence[Entry], offset: int) -> dict[str, Any]:
        """Of some of its tokens; offset: characters of those before."""
        return of_completion(entries, offset)


class ChatShape(CompletionShape):
    """The same of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        calls = [_call(one) for one in parts if isinstance(one, ToolCall)]
        text, thoughts = _text_of(parts, Said), _text_of(parts, Thought)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if thoughts:
            message["reasoning_content"] = thoughts
        return {"message": message}

    def chunk(self, part: Part | None) -> dict[str, Any]:
        match part:
            case None:
                return {"delta": {}}
            case Said(text):
                return {"delta": {"content": text}}
            case Thought(text):
                return {"delta": {"reasoning_content": text}}
            case ToolCall():
                return {"delta": {"tool_calls": [{"index": part.index} | _call(part)]}}

    def opening(self) -> dict[str, Any]:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, entries: Sequence[Entry], offset: int) -> dict[str, Any]:  # noqa: ARG002 (chats have none)
        return of_chat(entries)


def _text_of(parts: Sequence[Part], kind: type[Said | Thought]) -> str:
    return "".join(one.text for one in parts if isinstance(one, kind))


def _call(one: ToolCall) -> dict[str, Any]:
    return {
        "id": "call_" + secrets.token_hex(12),
        "type": "function",
        "function": {"name": one.name, "arguments": one.arguments},
    }


class AnswerFormat:
    """One request's answer as JSON."""

    def __init__(
        self,
        shape: CompletionShape,
        asked: GenerationFields,
        system_fingerprint: str,
        lossy: str | None = None,
        messages: Sequence[MessageParser | None] = (),
    ) -> None:
        """lossy: in every body and event, where the text is not the target's own; messages: of each choice what finds
        thoughts and calls in its text."""
        options = asked.stream_options
        self.shape, self.system_fingerprint, self.lossy = shape, system_fingerprint, lossy
        self.model_id, self.answers_each = asked.model, asked.n or 1
        self._messages = messages or [None] * asked.num_choices
        self.streamed = bool(asked.stream)
        self.with_token_ids, self.with_logprobs = bool(asked.return_token_ids), asked.num_logprobs is not None
        self._offsets = [0] * asked.num_choices
        """Characters of the tokens told so far, by choice."""
        self.with_usage = options is not None and options.include_usage
        """Whether a stream ends with an event of its usage."""
        self.answer_id = shape.id_prefix + secrets.token_hex(12)
        self.created = int(time.time())
        """Unix seconds."""

    def whole(self, pieces: Sequence[Sequence[Piece]], ends: Sequence[Finished]) -> bytes:
        """The body of an answer that is not streamed; pieces and ends by choice."""
        choices = []
        for index, (own, end) in enumerate(zip(pieces, ends, strict=True)):
            parts = [*chain.from_iterable(self._parts(index, one.text) for one in own), *self._last_parts(index)]
            told = Piece(
                "", [*chain.from_iterable(one.ids for one in own)], [*chain.from_iterable(one.logprobs for one in own)]
            )
            choices.append(self._choice(index, self.shape.whole(parts), told, self._reason(index, end)))
        return _json(self._body(self.shape.whole_object, choices) | self._usage(ends))

    def opening(self, index: int) -> Iterator[bytes]:
        """Events before the first text of a choice."""
        opening = self.shape.opening()
        if opening is not None:
            yield self._event([self._choice(index, opening, _NOTHING, None)])

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Its events; of a piece without text, as that of a character that is not complete yet, one where its tokens
        are told of, else none."""
        told = piece
        for part in self._parts(index, piece.text):
            yield self._part(index, part, told)
            told = _NOTHING
        if told.ids and (self.with_token_ids or self.with_logprobs):
            yield self._part(index, Said(""), told)

    def ending(self, index: int, end: Finished) -> Iterator[bytes]:
        """After the last text of a choice."""
        for part in self._last_parts(index):
            yield self._part(index, part, _NOTHING)
        yield self._event([self._choice(index, self.shape.chunk(None), _NOTHING, self._reason(index, end))])

    def closing(self, ends: Sequence[Finished]) -> Iterator[bytes]:
        """Events after the last choice."""
        if self.with_usage:
            yield _event(self._body(self.shape.chunk_object, []) | self._usage(ends))
        yield DONE

    def _parts(self, index: int, text: str) -> Iterator[Part]:
        message = self._messages[index]
        if message is not None:
            yield from message.push(text)
        elif text:
            yield Said(text)

    def _last_parts(self, index: int) -> Iterator[Part]:
        message = self._messages[index]
        if message is not None:
            yield from message.finish()

    def _part(self, index: int, part: Part, told: Piece) -> bytes:
        return self._event([self._choice(index, self.shape.chunk(part), told, None)])

    def _reason(self, index: int, end: Finished) -> str:
        message = self._messages[index]
        called = message is not None and message.num_calls and end.finish_reason == "stop"
        return "tool_calls" if called else end.finish_reason

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        body = self._body(self.shape.chunk_object, choices)
        return _event(body | {"usage": None} if self.with_usage else body)

    def _body(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model_id,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        } | ({} if self.lossy is None else {"lossy": self.lossy})

    def _choice(self, index: int, content: dict[str, Any], told: Piece, finish_reason: str | None) -> dict[str, Any]:
        """told: with the tokens that it tells of."""
        token_ids = {"token_ids": told.ids} if self.with_token_ids else {}
        logprobs = None
        if told.logprobs:
            logprobs = self.shape.logprobs(told.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(one.own.token) for one in told.logprobs)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **token_ids}

    def _usage(self, ends: Sequence[Finished]) -> dict[str, Any]:
        """OpenAI's counts, a prompt counted once, and beside those of a single choice what this decoder did."""
        prompts = [one.stats for one in ends[:: self.answers_each]]
        num_prompt, num_emitted = sum(one.num_prompt_tokens for one in prompts), sum(one.num_emitted for one in ends)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_emitted,
            "total_tokens": num_prompt + num_emitted,
            "prompt_tokens_details": {"cached_tokens": sum(one.num_cached for one in prompts)},
        }
        stats = ends[0].stats
        own = {"layerskip": stats.to_dict() | {"tokens_per_s": stats.tokens_per_s}} if len(ends) == 1 else {}
        return {"usage": usage, **own}


def error_event(body: dict[str, Any]) -> bytes:
    """What a stream ends with when it fails on the way; OpenAI's client raises it."""
    return _event(body)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"


def _json(body: dict[str, Any]) -> bytes:
    # ASCII: no line break, however exotic, can end an event early.
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
