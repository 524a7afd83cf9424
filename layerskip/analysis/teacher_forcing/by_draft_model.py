"""Drafts of a draft model at all positions of fixed texts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from layerskip.analysis.teacher_forcing.rows import ChooseNext, ForcedText
from layerskip.drafters.draft_model import DraftModel


def draft_model_logits(model: DraftModel, text: ForcedText, draft_vocab: int | None = None) -> torch.Tensor:
    """(1, T, V): however many tokens into a round, it has seen the text alone, as every right draft is the text's.

    Cost: one of its forwards over the text.
    """
    with model.engine.session(len(text.ids)):
        return model.forward(text.ids, len(text.continuation_ids), draft_vocab).clone().unsqueeze(0)


@contextmanager
def draft_model_chains(
    model: DraftModel, text: ForcedText, room: int, draft_vocab: int | None = None
) -> Iterator[DraftModelChains]:
    """Rounds of one text, the latest first. Cost: a forward over the text. room: most tokens of a round."""
    with model.engine.session(len(text.ids) + room + 1):
        model.forward(text.ids)
        yield DraftModelChains(model, text, draft_vocab)


@dataclass(frozen=True)
class DraftModelChains:
    """See `WeightsForcing.chains`."""

    model: DraftModel
    text: ForcedText
    draft_vocab: int | None

    def go_on(self, begun: Sequence[int], row: int, most: int, choose: ChooseNext, threshold: float) -> int:
        """Cost: a forward a token, the first over what the round has begun with."""
        first = len(self.text.prompt_ids) + row
        self.model.engine.cache.rollback_to(first)
        tokens = [self.text.ids[first], *begun]
        new = list(tokens)
        for added in range(1, most + 1):
            token, sure = choose(self.model.forward(new, draft_vocab=self.draft_vocab), tokens[1:])
            tokens.append(token)
            new = [token]
            if sure < threshold:
                return added
        return most
