"""Translation: between the tokens of the target and those of a draft model with another tokenizer, by their text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

REPLACEMENT = "\ufffd"
"""What bytes that are no whole character are decoded to."""
_LOOK_BEHIND = 8
"""Tokens of the text that new ones are decoded and encoded behind."""
_MOST_HELD = 3
"""Tokens at a text's end that may be an incomplete character of four bytes."""
_ENCODED_AGAIN, _KEPT, _CUTS_TRIED = 256, 64, 24
"""Characters at the text's end that are encoded again with what follows; beyond the first number all but about the
second are settled, where the encoding can be cut without a change."""


class TokenText:
    """Token ids of one tokenizer as text and back; special tokens are no text."""

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "added_tokens_decoder"):
            raise ValueError(
                "draft_weights: tokenizers that differ must be of Transformers' own classes, got "
                f"{type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        added = {i: str(one) for i, one in tokenizer.added_tokens_decoder.items() if one.special}
        self.special: dict[int, str] = added | dict(
            zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        )
        self.num_ids: int = 1 + max(tokenizer.get_vocab().values())
        self.start = list(takewhile(self.special.__contains__, tokenizer("a")["input_ids"]))
        """What a text begins with."""

    def is_text(self, token: int) -> bool:
        return token < self.num_ids and token not in self.special

    def encode(self, text: str) -> list[int]:
        """What looks like a special token is text here."""
        if not text:
            return []
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of these ids behind those, of which some tokenizers strip or need a blank."""
        head, whole = self.decode(before), self.decode([*before, *ids])
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids)

    def end_of(self, ids: Sequence[int], first: int) -> list[int]:
        """The last ids, from place `first` on: as many as are looked behind, and more to begin with a character."""
        start = max(first, len(ids) - _LOOK_BEHIND)
        while start > max(first, len(ids) - _LOOK_BEHIND - _MOST_HELD) and self.decode(ids[start:]).startswith(
            REPLACEMENT
        ):
            start -= 1
        return list(ids[start:])

    def same_in(self, other: TokenText) -> dict[int, int]:
        """The other tokenizer's special token for each of these that has one: by name, and end and beginning of a
        text by what they are."""
        pieces = {piece: token for token, piece in other.special.items()}
        found = {token: pieces[piece] for token, piece in self.special.items() if piece in pieces}
        for name in ("eos_token_id", "bos_token_id"):
            own, there = (getattr(one._tokenizer, name, None) for one in (self, other))
            if own is not None and there is not None:
                found.setdefault(own, there)
        return found


class Translation:
    """Between the tokens of the target and those of a draft model."""

    def __init__(self, target_tokenizer: Any, own_tokenizer: Any, vocabulary: int) -> None:
        """vocabulary: ids that the target knows."""
        self.target, self.own, self.vocabulary = TokenText(target_tokenizer), TokenText(own_tokenizer), vocabulary
        self.to_own, self.to_target = self.target.same_in(self.own), self.own.same_in(self.target)


class OwnContext:
    """A text in the draft model's tokens, kept up as the target's come.

    Cost: of the target's new tokens and of some hundred characters at the text's end, however long it is. The text of
    an incomplete character is waited for. A special token is the draft model's own of that name, or left out.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self.ids = list(translation.own.start)
        self.before: list[int] = []
        """The target's last tokens, back to a special one at most."""
        self.held: list[int] = []
        """Those at the end that are no whole character yet."""
        self.num_read = 0
        """Of the target's tokens."""
        self._end, self._num_left_out = "", 0
        """The text that is encoded again with what follows, and how many of its first tokens are but a blank that the
        tokenizer puts before every text."""
        self._num_settled = self.first = len(self.ids)
        """Tokens before it; and before what follows the last special one."""

    def follow(self, context: Sequence[int]) -> int:
        """Read what the text has grown by; how many ids stay as they were."""
        unchanged, target = self._num_settled, self._translation.target
        new, self.num_read = context[self.num_read :], len(context)
        run: list[int] = []
        for token in new:
            if target.is_text(token):
                run.append(token)
            else:
                self._read(run, is_whole=True)
                run = []
                self._begin_after(token)
        self._read(run)
        return unchanged

    def _begin_after(self, special: int) -> None:
        own = self._translation.to_own.get(special)
        # The beginning of a text is there already where the draft model's tokenizer puts it.
        if own is not None and not (self.ids == self._translation.own.start and own in self.ids):
            self.ids.append(own)
        self._num_settled = self.first = len(self.ids)
        self._end, self._num_left_out, self.before = "", 0, []

    def _read(self, run: list[int], *, is_whole: bool = False) -> None:
        target, own = self._translation.target, self._translation.own
        held = self.held + run
        if not held:
            return
        for count in range(len(held), max(0, len(held) - _MOST_HELD) - 1, -1):
            text = target.after(self.before, held[:count])
            if is_whole or not text.endswith(REPLACEMENT):
                break
        else:  # no character, however many bytes may follow
            count, text = len(held), target.after(self.before, held)
        taken, self.held = held[:count], held[count:]
        if taken:
            recent = [*self.before, *taken]
            self.before = target.end_of(recent, 0)
            self._end += text
            self.ids[self._num_settled :] = own.encode(self._end)[self._num_left_out :]
            self._settle()

    def _settle(self) -> None:
        end, ids = self._end, self.ids[self._num_settled :]
        if len(end) <= _ENCODED_AGAIN:
            return
        own = self._translation.own
        for cut in range(len(end) - _KEPT, len(end) - _KEPT - _CUTS_TRIED, -1):
            whole = own.encode(end[cut:])
            for left_out in (0, 1):
                kept = whole[left_out:]
                if kept and ids[-len(kept) :] == kept and own.decode(kept) == end[cut:]:
                    self._end, self._num_left_out = end[cut:], left_out
                    self._num_settled += len(ids) - len(kept)
                    return
        if len(end) > 2 * _ENCODED_AGAIN:  # one word without an end
            self._num_settled, self._end, self._num_left_out = len(self.ids), "", 0
