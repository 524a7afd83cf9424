"""Answers in OpenAI's JSON: whole, and as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from layerskip.server.schemas import GenerationFields
from layerskip.server.worker import Finished, Piece

DONE = b"data: [DONE]\n\n"


class CompletionShape:
    """Where /v1/completions puts the text."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        """The text of a whole answer's choice."""
        return {"text": text}

    def chunk(self, text: str | None) -> dict[str, Any]:
        """The text of an event's choice; None ends the answer."""
        return {"text": text or ""}

    def opening(self) -> dict[str, Any] | None:
        """What comes before the first text of a stream."""
        return None


class ChatShape(CompletionShape):
    """The same of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def chunk(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def opening(self) -> dict[str, Any]:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}


class AnswerFormat:
    """One request's answer as JSON."""

    def __init__(
        self, shape: CompletionShape, asked: GenerationFields, system_fingerprint: str, lossy: str | None = None
    ) -> None:
        """lossy: in every body and event, where the text is not the target's own."""
        options = asked.stream_options
        self.shape, self.system_fingerprint, self.lossy = shape, system_fingerprint, lossy
        self.model_id, self.answers_each = asked.model, asked.n or 1
        self.streamed = bool(asked.stream)
        self.with_token_ids = bool(asked.return_token_ids)
        self.with_usage = options is not None and options.include_usage
        """Whether a stream ends with an event of its usage."""
        self.answer_id = shape.id_prefix + secrets.token_hex(12)
        self.created = int(time.time())
        """Unix seconds."""

    def whole(self, pieces: Sequence[Sequence[Piece]], ends: Sequence[Finished]) -> bytes:
        """The body of an answer that is not streamed; pieces and ends by choice."""
        choices = [
            self._choice(
                index,
                self.shape.whole("".join(one.text for one in own)),
                [token for one in own for token in one.ids],
                end.finish_reason,
            )
            for index, (own, end) in enumerate(zip(pieces, ends, strict=True))
        ]
        return _json(self._body(self.shape.whole_object, choices) | self._usage(ends))

    def opening(self, index: int) -> Iterator[bytes]:
        """Events before the first text of a choice."""
        opening = self.shape.opening()
        if opening is not None:
            yield self._event([self._choice(index, opening, [], None)])

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """One event, or none for a piece without text: that of a character that is not complete yet."""
        if piece.text or (self.with_token_ids and piece.ids):
            yield self._event([self._choice(index, self.shape.chunk(piece.text), piece.ids, None)])

    def ending(self, index: int, end: Finished) -> Iterator[bytes]:
        """After the last text of a choice."""
        yield self._event([self._choice(index, self.shape.chunk(None), [], end.finish_reason)])

    def closing(self, ends: Sequence[Finished]) -> Iterator[bytes]:
        """Events after the last choice."""
        if self.with_usage:
            yield _event(self._body(self.shape.chunk_object, []) | self._usage(ends))
        yield DONE

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

    def _choice(self, index: int, content: dict[str, Any], ids: list[int], finish_reason: str | None) -> dict[str, Any]:
        token_ids = {"token_ids": ids} if self.with_token_ids else {}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason, **token_ids}

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
