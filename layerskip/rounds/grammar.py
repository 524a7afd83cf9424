"""Grammar: what an output has to look like; tokens that do not lead there are impossible. By llguidance."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layerskip.config.strict_json import parse_json

JSON_BLANKS = {"x-guidance": {"whitespace_pattern": r"\n[ ]{0,24}|[ ]"}}
"""Between the parts of JSON, as a part of its schema. JSON may have any number, and a small model may go on with them
for ever."""
_NEEDED = "needs the structured extra, pip install 'layerskip[structured]'"


@dataclass(frozen=True)
class Grammar:
    """Of JSON, of a regular expression, of one of some texts, or in the notation of Lark as llguidance reads it."""

    source: str
    """In llguidance's own notation."""

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str | None = None) -> Grammar:
        """JSON that keeps to a schema; without one any object. Raises: ValueError for what is no schema."""
        given = parse_json(schema) if isinstance(schema, str) else {"type": "object"} if schema is None else schema
        if not isinstance(given, Mapping):
            raise ValueError(f"grammar: a schema must be a JSON object, got {type(given).__name__}")
        try:
            text = json.dumps(JSON_BLANKS | dict(given))
        except (TypeError, ValueError) as error:
            raise ValueError(f"grammar: a schema must be JSON: {error}") from None
        return cls(_matcher_class().grammar_from_json_schema(text))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """All of the output matches this pattern, in the notation of Rust's crate `regex`."""
        return cls(_matcher_class().grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """The output is one of these texts. Raises: ValueError where there are none."""
        if isinstance(texts, str) or not texts or not all(isinstance(one, str) and one for one in texts):
            raise ValueError(f"grammar: a choice must be of texts, none of them empty, got {texts!r:.80}")
        return cls.lark("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in texts))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""
        return cls(_matcher_class().grammar_from_lark(text))


class GrammarTokens:
    """A tokenizer's tokens as texts: what grammars are compiled for. Cost: a second, and some ten bytes a token.

    Raises: ValueError without the extra, and for a tokenizer that is not a fast one or knows no end of a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if tokenizer is None or not eos_token_ids:
            raise ValueError("grammar: needs a tokenizer, and a token that ends a text")
        self._matcher_class = _matcher_class()
        self._vocab_size = vocab_size
        from llguidance.hf import from_tokenizer

        try:
            self._tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except Exception as error:  # noqa: BLE001 (it raises what Rust says)
            raise ValueError(f"grammar: this tokenizer cannot be read: {' '.join(str(error).split())[:200]}") from None

    def state(self, grammar: Grammar) -> GrammarState:
        """Of a text that has not begun. Raises: ValueError that says what is wrong with the grammar."""
        matcher = self._matcher_class(self._tokens, grammar.source, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {' '.join(matcher.get_error().split())[:300]}")
        return GrammarState(matcher, self._vocab_size, self._tokens.eos_tokens)


class GrammarState:
    """How far a text has come in its grammar; goes back and forth with what is drafted.

    Cost of a row: some tens of microseconds on the host, a copy of its allowed ids to the device, and of the row; one
    device sync for all of them.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._only_end = np.zeros(vocab_size, dtype=bool)
        self._only_end[list(eos_token_ids)] = True
        self._start = self._num_settled = 0
        self._taken: list[int] = []
        """Tokens behind the prompt that the matcher has read."""

    def begin(self, place: int) -> None:
        """A prompt of so many tokens is about to be continued."""
        self._start, self._num_settled, self._taken = place, 0, []
        self._matcher.reset()

    def settle(self, place: int) -> None:
        """The tokens before `place` are chosen for good."""
        self._num_settled = place - self._start

    def allow(self, scores: torch.Tensor, context: Sequence[int], drafted: torch.Tensor | None) -> torch.Tensor:
        """(T, V) in which only tokens that the grammar allows are possible; row i follows `context` and the first i of
        `drafted` (T - 1,). As they were are rows behind a drafted token that is not allowed, and rows in which nothing
        else is possible, of drafts among few token ids.

        Raises: RuntimeError where llguidance gives up, or what is settled of the text is not as it said.
        """
        text, more = list(context[self._start :]), [] if drafted is None else drafted.tolist()
        rows = np.ones((len(scores), scores.shape[1]), dtype=bool)
        for i, row in enumerate(rows):
            if not self._go_to(text + more[:i]):
                if len(self._taken) < self._num_settled:
                    raise RuntimeError(f"grammar: refuses token {text[len(self._taken)]}, which it allowed before")
                break
            row[: self._vocab_size] = self._allowed()
            row[self._vocab_size :] = False
        left = torch.where(torch.from_numpy(rows).to(scores.device), scores, float("-inf"))
        for i in (left.amax(dim=-1) == float("-inf")).nonzero().flatten().tolist():
            left[i] = scores[i]
        return left

    def forced(self, context: Sequence[int], most: int) -> list[int]:
        """Tokens, as they are usual, of the text that alone can follow; up to `most`."""
        if most < 1 or not self._go_to(list(context[self._start :])) or self._matcher.is_stopped():
            return []
        found: list[int] = self._matcher.compute_ff_tokens()[:most]
        return found

    def num_allowed(self, context: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of these tokens may follow one after the other."""
        text = list(context[self._start :])
        self._go_to([*text, *tokens])
        return max(0, len(self._taken) - len(text))

    def _go_to(self, text: list[int]) -> bool:
        """Whether all of it is allowed, up to the end of the text as the grammar has it; else the matcher has read it
        as far as it is."""
        same = min(len(self._taken), len(text))
        if self._taken[:same] != text[:same]:
            same = next(i for i in range(same) if self._taken[i] != text[i])
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        if same < len(text) and not self._matcher.is_stopped():
            count = self._matcher.try_consume_tokens(text[same:])
            self._taken += text[same : same + count]
        return len(self._taken) == len(text) or self._matcher.is_stopped()

    def _allowed(self) -> Any:
        if self._matcher.is_stopped():
            if self._matcher.is_error():  # beyond what llguidance takes upon itself
                raise RuntimeError(f"grammar: {' '.join(self._matcher.get_error().split())[:300]}")
            return self._only_end
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(bool)


def _matcher_class() -> Any:
    try:
        return importlib.import_module("llguidance").LLMatcher
    except ImportError:
        raise ValueError(f"grammar: {_NEEDED}") from None
