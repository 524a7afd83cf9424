"""OtherTokenizerDrafter: a draft model with a tokenizer of its own reads the text, and what it says is encoded anew."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile

import torch

from layerskip.config.skip_mask import SkipMask
from layerskip.drafters.base import Draft
from layerskip.drafters.chain import ChainDrafter, WeightsSettings
from layerskip.drafters.draft_model import OWN_FOR_ONE, DraftModel
from layerskip.drafters.translation import REPLACEMENT, OwnContext, Translation
from layerskip.rounds.preparation import ForwardPlan, Starts
from layerskip.rounds.sampling import Sampler, SamplingParams

_USUAL_CATCH_UP = (1, 2)


class OtherTokenizerDrafter(ChainDrafter[WeightsSettings]):
    """The draft model goes on in its own tokens, greedily, until their text is gamma tokens of the target's.

    Sampled text too is drafted greedily: the random numbers of a place belong to the target's token ids, and of drafts
    that do not share them the likeliest token is right most often. `draft_threshold` looks at its own tokens, and of
    penalties the repetition penalty alone acts, on its own tokens.
    Cost: of a round, a forward of the draft model and a device sync for each of its tokens, and on the host a decoding
    and an encoding of some twenty tokens each.
    """

    def __init__(self, model: DraftModel, translation: Translation, sampler: Sampler, settings: WeightsSettings):
        greedy = Sampler(SamplingParams(repetition_penalty=sampler.params.repetition_penalty))
        super().__init__(greedy, settings)
        self._model, self._translation = model, translation

    def session(self, capacity: int) -> AbstractContextManager[None]:
        """See `Drafter`."""
        return self._model.session(capacity)

    def prepare(self, starts: Starts) -> None:
        if rounds := starts.rounds:
            engine, mask = self._model.engine, SkipMask.none(self._model.num_layers)
            # A text may be shorter in its tokens, too.
            own = range(rounds.start // OWN_FOR_ONE, min(OWN_FOR_ONE * rounds.stop, engine.cache.capacity))
            engine.prepare([ForwardPlan(mask, count, own) for count in _USUAL_CATCH_UP])

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
        found = self._draft(text, ends, limit, min(room, OWN_FOR_ONE * self._drafter.gamma))
        return Draft(torch.tensor(found)) if found else None

    def rehearse(self, context: Sequence[int], count: int) -> None:
        """What so many drafts take wherever the text ends, for timing: as many of its own tokens as this text has for
        so many of the target's."""
        own, both = self._context, self._translation
        self._num_same = min(self._num_same, own.follow(context))
        if not own.ids:
            return
        text, before, drafted = both.target.decode(own.before), both.own.end_of(own.ids, own.first), list[int]()
        room = self._model.engine.cache.capacity - len(own.ids) + 1
        self._catch_up()
        both.target.encode(text)
        for step in self._drafter.steps(own.ids, min(room, max(1, round(count * self.own_for_one))), self._go_on):
            drafted.append(int(step.token))
            both.target.encode(text + both.own.after(before, drafted))

    @property
    def own_for_one(self) -> float:
        """Own tokens of the text to one of the target's."""
        return len(self._context.ids) / max(1, self._context.num_read)

    def _draft(self, text: str, ends: list[int], limit: int, room: int) -> list[int]:
        """Up to `limit` tokens of the target's behind `text`, whose tokens are `ends`; at most `room` of the own."""
        own, both = self._context, self._translation
        before, drafted, found = both.own.end_of(own.ids, own.first), list[int](), list[int]()
        self._catch_up()
        for step in self._drafter.steps(own.ids, room, self._go_on):
            drafted.append(int(step.token))
            if not both.own.is_text(drafted[-1]):
                found = [*found, *(both.to_target[one] for one in drafted[-1:] if one in both.to_target)]
                self._note(len(found), step.sure)
                break
            more = both.own.after(before, drafted)
            if not more.endswith(REPLACEMENT):
                whole = both.target.encode(text + more)
                if whole[: len(ends)] != ends:
                    break
                found = whole[len(ends) :]
            self._note(len(found), step.sure)
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
        most = min(len(cached), len(ids) - 1)
        same = min(self._num_same, most)
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
