"""Token ids as they come -> pieces of text whose concatenation is the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LOOKED_AT = 6
"""Ids of the text before: more than one, as the first of a window may lose its blank."""


class TextStream:
    """Incremental detokenisation: a piece is held back while its last character is not complete.

    Decodes a short window twice, with and without the new ids, so that tokenizers whose tokens look different at the
    start of a text (leading spaces) still give the right piece. Cost: three decodes of a short window per `push`.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """before: ids of the text that is gone on from, of which the last ones are looked at: some tokenizers drop the
        blank that a text begins with."""
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._ids = list(before[-_LOOKED_AT:])
        self._window_start = 0
        self._shown = len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._window_start : self._shown])
        after = self._decode(self._ids[self._window_start :])
        if after.endswith("\ufffd"):
            return ""
        if self._decode(self._ids[self._shown :]):  # else tokens that say nothing would begin the next window
            self._window_start = self._shown
        self._shown = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What was held back, broken characters and all."""
        before = self._decode(self._ids[self._window_start : self._shown])
        after = self._decode(self._ids[self._window_start :])
        self._window_start = self._shown = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return text
