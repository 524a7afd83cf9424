"""Drafts of trained weights at all positions of fixed texts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.analysis.teacher_forcing.by_other_tokenizer import proposals, proposed_after
from layerskip.analysis.teacher_forcing.rows import ChooseNext, ForcedText
from layerskip.analysis.teacher_forcing.trees import TreeReadings, read_trees
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.draft_model import DraftModel
from layerskip.drafters.draft_weights import loaded_weights
from layerskip.drafters.eagle.state_head import StateHead, StateText
from layerskip.rounds.sampling import Sampler

_DEPTH = 7
"""Drafts into a round that are read at least. Each costs a layer over the text, and their acceptance falls from one to
the next, because all but the first go on from states of the draft's own."""


@dataclass
class _Text:
    states: torch.Tensor
    """(T, depths * hidden) of the target at every position."""
    embedded: torch.Tensor
    """(T - 1, embedding) of the tokens after the first."""
    drafting: StateText
    """Keys and values of every position but the last, from the target's states."""
    hidden: torch.Tensor
    """(T - 1, hidden): what the layer gave there."""


class WeightsForcing:
    """What trained weights draft along the texts of a teacher forcing. Of layers, see `StateHead.rollouts`.

    Cost, of layers: a target forward over a text when it is first asked for. Memory: the target's last states, and the
    head's keys and values, of every text.
    """

    def __init__(self, engine: Any, texts: Sequence[ForcedText]) -> None:
        """engine: for layers on the target's states a `StatesEngine`."""
        self._engine, self._texts = engine, texts
        self._known: dict[tuple[str, int], _Text] = {}

    @torch.inference_mode()
    def logits(self, weights: DraftWeights, i: int, depth: int) -> torch.Tensor:
        """(D + 1, T, V) of one text, D at least `depth`, row (d, k) after continuation token k, d tokens into a
        round; of what does not depend on that, for d = 0 alone."""
        head, one = loaded_weights(self._engine, weights), self._texts[i]
        if isinstance(head, DraftModel):
            # However many tokens into a round, it has seen the text alone, as every right draft is the text's.
            with head.engine.session(len(one.ids)):
                return head.forward(one.ids, len(one.continuation_ids), weights.draft_vocab).clone().unsqueeze(0)
        text = self._text(weights, head, i)
        start, count = len(one.prompt_ids), len(one.continuation_ids)
        depth = max(depth, _DEPTH)
        first = max(0, start - 1 - depth)
        steps = head.rollouts(text.states[:-1], text.embedded, depth, first)
        hidden = torch.stack([step[start - 1 - first :][:count] for step in steps])
        logits = head.logits(self._engine, hidden.flatten(0, 1), weights.draft_vocab)
        return logits.view(len(steps), count, -1)

    @torch.inference_mode()
    def trees(self, weights: DraftWeights, i: int, depth: int, sampler: Sampler) -> TreeReadings:
        """See `read_trees`."""
        head, one = loaded_weights(self._engine, weights), self._texts[i]
        assert isinstance(head, StateHead)
        text = self._text(weights, head, i)
        return read_trees(self._engine, text.drafting, text.hidden, one, sampler, weights, depth)

    @torch.inference_mode()
    def proposals(self, weights: DraftWeights, i: int, depth: int, sampler: Sampler) -> torch.Tensor | None:
        """See `proposals`, as deep as asked for or else some tokens; None where the draft's logits are the target's
        tokens' and `logits` tells more."""
        head = loaded_weights(self._engine, weights)
        if not isinstance(head, DraftModel) or head.translation is None:
            return None
        return proposals(head, head.translation, self._texts[i], sampler, (depth or _DEPTH) + 1)

    @torch.inference_mode()
    def proposed_after(
        self, weights: DraftWeights, i: int, rounds: Sequence[tuple[int, int]], threshold: float, sampler: Sampler
    ) -> list[int] | None:
        """See `proposed_after`; None as for `proposals`."""
        head = loaded_weights(self._engine, weights)
        if not isinstance(head, DraftModel) or head.translation is None:
            return None
        return proposed_after(head, head.translation, self._texts[i], sampler, rounds, threshold)

    @contextmanager
    def chains(self, weights: DraftWeights, i: int, room: int) -> Iterator[Chains]:
        """Rounds of one text, of up to `room` tokens. Cost, of a draft model: a forward over the text."""
        head, one = loaded_weights(self._engine, weights), self._texts[i]
        if isinstance(head, DraftModel):
            with head.engine.session(len(one.ids) + room + 1):
                head.forward(one.ids)
                yield _DraftModelChains(head, one, weights.draft_vocab)
        else:
            yield _EagleChains(self._engine, head, self._text(weights, head, i), one, weights.draft_vocab)

    def _text(self, weights: DraftWeights, head: StateHead, i: int) -> _Text:
        key = (weights.path, i)
        if key not in self._known:
            engine = self._engine
            ids = torch.tensor(self._texts[i].ids, device=engine.device)
            with engine.session(len(ids)):
                engine.keep_states(head.aux_layers)
                engine.forward(ids)
                states = engine.states[: len(ids)].clone()  # an engine may keep room for longer texts
            embedded = engine.embed(ids[1:])
            drafting = head.new_text(len(ids) + 64)
            hidden = drafting.run(head.enter(embedded, head.join(states[:-1])), 0)
            self._known[key] = _Text(states, embedded, drafting, hidden)
        return self._known[key]


@dataclass(frozen=True)
class _DraftModelChains:
    """See `Chains`. Cost: a forward a token, the first over what the round has begun with."""

    model: DraftModel
    text: ForcedText
    draft_vocab: int | None

    def go_on(self, begun: Sequence[int], row: int, most: int, choose: ChooseNext, threshold: float) -> int:
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


@dataclass(frozen=True)
class _EagleChains:
    """See `Chains`. Cost: a layer a token."""

    engine: Any
    head: StateHead
    text: _Text
    one: ForcedText
    draft_vocab: int | None

    def go_on(self, begun: Sequence[int], row: int, most: int, choose: ChooseNext, threshold: float) -> int:
        head, text, one = self.head, self.text, self.one
        engine, drafting = self.engine, text.drafting
        first = len(one.prompt_ids) + row - 1
        """Position of the last state that the target has computed."""
        stop = min(first + len(begun) + most + 1, drafting.keys.shape[2])
        kept = [buffer[:, :, first:stop].clone() for buffer in (drafting.keys, drafting.values)]
        state = head.join(text.states[first : first + 1])
        tokens = [one.ids[first + 1], *begun]
        added = 0
        try:
            for place in range(len(begun) + most):
                embedded = engine.embed(torch.tensor([tokens[place]], device=engine.device))
                state = drafting.run(head.enter(embedded, state), first + place)
                if place < len(begun):
                    continue
                token, sure = choose(head.logits(engine, state, self.draft_vocab), tokens[1:])
                tokens.append(token)
                added += 1
                if sure < threshold:
                    break
        finally:
            for buffer, before in zip((drafting.keys, drafting.values), kept, strict=True):
                buffer[:, :, first:stop] = before
        return added


Chains = _DraftModelChains | _EagleChains
"""Rounds of one text that have gone wrong, the latest first.

`go_on` says how many tokens a draft adds to a round, up to `most` or the first unsure one. begun: what the round that
starts after continuation token `row` has drafted; no later one than the call before.
"""
