"""OtherTokenizerDrafter: a draft model with a tokenizer of its own reads the text, and what it says is encoded anew."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from layerskip.drafters.base import Draft
from layerskip.drafters.chain import ChainDrafter, WeightsSettings
from layerskip.rounds.preparation import ForwardPlan, Starts
from layerskip.rounds.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from layerskip.drafters.draft_model import DraftModel

_REPLACEMENT = "\ufffd"
"""What bytes that are no whole character are decoded to."""
_OWN_FOR_ONE = 3
"""Tokens of the draft model that there is room for to one of the target's; a text that takes more is not drafted."""
_LOOK_BEHIND = 8
"""Tokens of the text that new ones are decoded and encoded behind."""
_MOST_HELD = 3
"""Tokens at a text's end that may be an incomplete character of four bytes."""
_ENCODED_AGAIN, _KEPT, _CUTS_TRIED = 256, 64, 24
"""Characters at the text's end that are encoded again with what follows; beyond the first number all but about the
second are settled, where the encoding can be cut without a change."""
_USUAL_CATCH_UP = (1, 2)


class TokenText:
    """Token ids of one tokenizer as text and back; special tokens are no text."""

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "added_tokens_decoder"):
            raise ValueError(
                f"draft_weights: a tokenizer that differs must be one of Transformers' own, got {type(tokenizer).__name__}"
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
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
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
            _REPLACEMENT
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
        self._end = ""
        """The text that is encoded again with what follows."""
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
        self._end, self.before = "", []

    def _read(self, run: list[int], *, is_whole: bool = False) -> None:
        target, own = self._translation.target, self._translation.own
        held = self.held + run
        if not held:
            return
        for count in range(len(held), max(0, len(held) - _MOST_HELD) - 1, -1):
            text = target.after(self.before, held[:count])
            if is_whole or not text.endswith(_REPLACEMENT):
                break
        else:  # no character, however many bytes may follow
            count, text = len(held), target.after(self.before, held)
        taken, self.held = held[:count], held[count:]
        if taken:
            recent = [*self.before, *taken]
            self.before = target.end_of(recent, 0)
            self._end += text
            self.ids[self._num_settled :] = own.encode(self._end)
            self._settle()

    def _settle(self) -> None:
        end, ids = self._end, self.ids[self._num_settled :]
        if len(end) <= _ENCODED_AGAIN:
            return
        for cut in range(len(end) - _KEPT, len(end) - _KEPT - _CUTS_TRIED, -1):
            kept = self._translation.own.encode(end[cut:])
            if kept and ids[-len(kept) :] == kept:
                self._end = end[cut:]
                self._num_settled += len(ids) - len(kept)
                return
        if len(end) > 2 * _ENCODED_AGAIN:  # one word without an end
            self._num_settled, self._end = len(self.ids), ""


class OtherTokenizerDrafter(ChainDrafter[WeightsSettings]):
    """The draft model goes on in its own tokens, greedily, until their text is gamma tokens of the target's.

    Sampled text too is drafted greedily: the random numbers of a place belong to the target's token ids, and of drafts
    that do not share them the likeliest token is right most often. `draft_threshold` looks at its own tokens.
    Cost: of a round, a forward of the draft model and a device sync for each of its tokens, and on the host a decoding
    and an encoding of some twenty tokens each.
    """

    def __init__(self, model: DraftModel, translation: Translation, sampler: Sampler, settings: WeightsSettings):
        greedy = Sampler(SamplingParams(repetition_penalty=sampler.params.repetition_penalty))
        super().__init__(greedy, settings)
        self._model, self._translation = model, translation

    def session(self, capacity: int) -> AbstractContextManager[None]:
        """See `Drafter`."""
        most = self._model.max_positions
        own = _OWN_FOR_ONE * capacity
        return self._model.engine.session(own if most is None else max(1, min(own, most)))

    def prepare(self, starts: Starts, *, profile: bool) -> None:  # noqa: ARG002 (drafting is timed apart as it is)
        if rounds := starts.rounds:
            # A text may be shorter in its tokens, too.
            own = range(rounds.start // _OWN_FOR_ONE, _OWN_FOR_ONE * rounds.stop)
            self._model.engine.prepare([ForwardPlan(None, count, own) for count in _USUAL_CATCH_UP])

    def begin(self) -> OtherTokenizerSession:
        return OtherTokenizerSession(self, self._model, self._translation)


class OtherTokenizerSession:
    """See `DraftSession`."""

    def __init__(self, drafter: OtherTokenizerDrafter, model: DraftModel, translation: Translation) -> None:
        self._drafter, self._model, self._translation = drafter, model, translation
        self._context = OwnContext(translation)
        self._cached: list[int] = []
        """Own tokens that its cache holds."""
        self._num_same = 0
        """How many of them are sure to be the text's."""
        self.confidences: list[float] = []
        """Of the latest proposal's tokens: the least `draft_threshold` that the draft would have ended at there."""

    def propose(self, context: Sequence[int], limit: int, target_prob: float | None) -> Draft | None:
        """See `DraftSession`. None while the target is unsure or a character is incomplete, and where the end of the
        text, encoded again, is not the tokens that the target has said."""
        limit = min(limit, self._drafter.gamma)
        self.confidences = []
        if limit < 1 or not self._drafter.is_sure(target_prob):
            return None
        own, target = self._context, self._translation.target
        self._num_same = min(self._num_same, own.follow(context))
        room = self._model.engine.cache.capacity - len(own.ids) + 1
        if own.held or not own.ids or room < 1:
            return None
        text = target.decode(own.before)
        ends = target.encode(text)
        checked = (len(own.before) + 1) // 2
        if ends[len(ends) - checked :] != own.before[len(own.before) - checked :]:
            return None
        found = self._draft(text, ends, limit, min(room, _OWN_FOR_ONE * limit))
        return Draft(torch.tensor(found)) if found else None

    def _draft(self, text: str, ends: list[int], limit: int, room: int) -> list[int]:
        """Up to `limit` tokens of the target's behind `text`, whose tokens are `ends`; at most `room` of the own."""
        own, both = self._context, self._translation
        before, drafted, found = both.own.end_of(own.ids, own.first), list[int](), list[int]()
        self._catch_up()
        for token, sure in self._drafter.steps(own.ids, room, self._go_on):
            drafted.append(int(token))
            if not both.own.is_text(drafted[-1]):
                found = [*found, *(both.to_target[one] for one in drafted[-1:] if one in both.to_target)]
                self._note(len(found), sure)
                break
            more = both.own.after(before, drafted)
            if not more.endswith(_REPLACEMENT):
                whole = both.target.encode(text + more)
                if whole[: len(ends)] != ends:
                    break
                found = whole[len(ends) :]
            self._note(len(found), sure)
            if len(found) >= limit:
                break
        return list(takewhile(lambda one: one < both.vocabulary, found[:limit]))

    def _note(self, count: int, sure: float | None) -> None:
        known = self.confidences[:count]
        self.confidences = known + [1.0] * (count - len(known))
        if sure is not None and count:
            self.confidences[-1] = min(self.confidences[-1], sure)

    def forget_from(self, position: int) -> None:
        """The next round goes over some of the text again, as much as follows this position."""
        self._num_same = max(0, len(self._context.ids) - (self._context.num_read - position - 1))
        del self._cached[self._num_same :]

    def _catch_up(self) -> None:
        """Keep what the cache holds of this text; all but the last token of it at most."""
        ids, cached = self._context.ids, self._cached
        same, most = min(self._num_same, len(ids) - 1), min(len(cached), len(ids) - 1)
        while same < most and cached[same] == ids[same]:
            same += 1
        del cached[same:]
        self._model.engine.cache.rollback_to(same)
        self._num_same = len(ids)

    def _go_on(self, last: torch.Tensor | None) -> torch.Tensor:
        ids = self._context.ids[len(self._cached) :] if last is None else [int(last)]
        logits = self._model.forward(ids)
        self._cached += ids
        return logits
