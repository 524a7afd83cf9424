"""Proposals of a draft model with another tokenizer from every position of fixed texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from layerskip.analysis.teacher_forcing.rows import MOST_RANK, ForcedText
from layerskip.drafters.chain import WeightsSettings
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.other_tokenizer import OtherTokenizerDrafter, OtherTokenizerSession
from layerskip.drafters.translation import Translation
from layerskip.rounds.sampling import Sampler

ENDS_HERE, NOTHING = -1.0, -2.0
"""Confidences below every `draft_threshold`: after this token a proposal ends by itself; from here nothing is proposed
at all."""
_LOOKED_AT = 1e-30
"""A threshold that is looked at and never reached."""


def proposals(
    model: DraftModel, translation: Translation, text: ForcedText, sampler: Sampler, count: int
) -> torch.Tensor:
    """(4, count, T) float64: whether right, rank of the text's token, confidence and token, row (d, k) after
    continuation token k, d tokens into a proposal of up to `count`. What follows a wrong token of its proposal is that
    proposal's, too.

    Cost: the drafts from every position, one after the other.
    """
    known, length = text.continuation_ids, len(text.continuation_ids)
    found = torch.zeros(4, count, length, dtype=torch.float64)
    found[1], found[2] = MOST_RANK, 1.0
    with _session(model, translation, text, sampler, WeightsSettings(count, _LOOKED_AT)) as session:
        for k in range(length):
            draft = session.propose([*text.prompt_ids, *known[: k + 1]], count, None)
            tokens = [] if draft is None else draft.ids.tolist()
            ends = [ENDS_HERE] if len(tokens) < count else []
            sure = [*session.confidences[: len(tokens) - len(ends)], *ends]
            for d, (token, one) in enumerate(zip(tokens, sure, strict=False)):
                if k + d < length:
                    right = k + d + 1 < length and known[k + d + 1] == token
                    found[:, d, k + d] = torch.tensor([float(right), MOST_RANK, one, float(token)])
            if not tokens:
                found[2, 0, k] = NOTHING
    return found


def proposed_after(
    model: DraftModel,
    translation: Translation,
    text: ForcedText,
    sampler: Sampler,
    rounds: Sequence[tuple[int, int]],
    threshold: float,
) -> list[int]:
    """How many tokens are proposed in each round, given as the continuation token that it starts after, and its room.

    Cost: the rounds' drafts, and a forward over the text.
    """
    counts = [0] * len(rounds)
    settings = WeightsSettings(max(room for _, room in rounds), threshold)
    with _session(model, translation, text, sampler, settings) as session:
        for place in sorted(range(len(rounds)), key=lambda one: rounds[one][0]):
            start, room = rounds[place]
            draft = session.propose([*text.prompt_ids, *text.continuation_ids[: start + 1]], room, None)
            counts[place] = 0 if draft is None else len(draft.ids)
    return counts


@contextmanager
def _session(
    model: DraftModel, translation: Translation, text: ForcedText, sampler: Sampler, settings: WeightsSettings
) -> Iterator[OtherTokenizerSession]:
    drafter = OtherTokenizerDrafter(model, translation, sampler, settings)
    with drafter.session(len(text.ids) + settings.gamma):
        yield drafter.begin()
