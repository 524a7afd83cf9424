"""Log-probabilities of an answer's tokens with the tokens' texts, and in OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from layerskip.rounds.logprobs import TokenLogprobs

_LEAST = -9999.0
"""JSON has no infinity."""


class NamedLogprob(NamedTuple):
    """Of a token by its text."""

    token: str
    logprob: float | None
    """None of a text's first token, which follows nothing."""


class Entry(NamedTuple):
    """One token of an answer, and the likeliest at its place."""

    own: NamedLogprob
    top: tuple[NamedLogprob, ...]


class TokenNames:
    """Texts of token ids, special ones too, as they are in the middle of a text. Belongs to one thread, as its
    tokenizer does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @cached_property
    def _before(self) -> list[int]:
        ids: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids[-1:]

    def entries(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Entry]:
        """Of each of these tokens; none where there are no logprobs."""
        return [
            Entry(self._named(token, one.logprob), tuple(self._named(*other) for other in one.top))
            for token, one in zip(ids, logprobs, strict=False)
        ]

    def of_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Entry]:
        """Of each of a prompt's tokens, the first of which has no logprobs."""
        return [Entry(NamedLogprob(self._text(ids[0]), None), ()), *self.entries(ids[1:], logprobs)]

    def _named(self, token: int, logprob: float) -> NamedLogprob:
        return NamedLogprob(self._text(token), max(logprob, _LEAST))

    def _text(self, token: int) -> str:
        if token not in self._known:
            # Some tokenizers drop the blank that a text begins with.
            self._known[token] = self._decode([*self._before, token])[len(self._decode(self._before)) :]
        return self._known[token]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def of_chat(entries: Sequence[Entry]) -> dict[str, Any]:
    """As /v1/chat/completions has them."""
    content = [_with_bytes(one.own) | {"top_logprobs": [_with_bytes(top) for top in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def of_completion(entries: Sequence[Entry], offset: int) -> dict[str, Any]:
    """As /v1/completions has them; offset: characters of the tokens before."""
    offsets = []
    for one in entries:
        offsets.append(offset)
        offset += len(one.own.token)
    return {
        "tokens": [one.own.token for one in entries],
        "token_logprobs": [one.own.logprob for one in entries],
        "top_logprobs": [None if one.own.logprob is None else dict([*one.top[::-1], one.own]) for one in entries],
        "text_offset": offsets,
    }


def _with_bytes(one: NamedLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode())}
