"""Drafts of trained weights at all positions of fixed texts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.eagle import LeanEagle, LeanEagleText

_DEPTH = 7
"""Drafts into a round that are read at least. Each costs a layer over the text, and their acceptance falls from one to
the next, because all but the first go on from states of the draft's own."""
ChooseNext = Callable[[torch.Tensor, Sequence[int]], tuple[int, float]]
"""The token chosen from logits (1, V) after continuation tokens, and the top probability."""


@dataclass
class _Text:
    states: torch.Tensor
    """(T, hidden) of the target at every position."""
    embedded: torch.Tensor
    """(T - 1, embedding) of the tokens after the first."""
    drafting: LeanEagleText
    """Keys and values of every position but the last, from the target's states."""


class WeightsForcing:
    """What trained weights draft along the texts of a teacher forcing. See `EagleHead.rollouts`.

    Cost: a target forward over a text when it is first asked for. Memory: the target's last states, and the head's keys
    and values, of every text.
    """

    def __init__(self, engine: Any, texts: Sequence[ForcedText]) -> None:
        """engine: a `StatesEngine`."""
        self._engine, self._texts = engine, texts
        self._known: dict[tuple[str, int], _Text] = {}

    @torch.inference_mode()
    def logits(self, weights: DraftWeights, i: int, depth: int) -> torch.Tensor:
        """(D + 1, T, V) of one text, D at least `depth`, row (d, k) after continuation token k, d tokens into a
        round."""
        head, text, one = self._head(weights), self._text(weights, i), self._texts[i]
        start, count = len(one.prompt_ids), len(one.continuation_ids)
        depth = max(depth, _DEPTH)
        first = max(0, start - 1 - depth)
        steps = head.module.rollouts(text.states[:-1][None], text.embedded[None], depth, first)
        hidden = torch.stack([step[0, start - 1 - first :][:count] for step in steps])
        logits: torch.Tensor = self._engine.unembed(head.norm(hidden.flatten(0, 1)))
        return logits.view(len(steps), count, -1)

    @torch.inference_mode()
    def go_on(
        self,
        weights: DraftWeights,
        i: int,
        begun: Sequence[int],
        row: int,
        most: int,
        choose: ChooseNext,
        threshold: float,
    ) -> int:
        """How many tokens a draft adds to a round, up to `most` or the first unsure one.

        begun: what the round that starts after continuation token `row` has drafted. Cost: a layer a token.
        """
        head, text, one = self._head(weights), self._text(weights, i), self._texts[i]
        engine, drafting = self._engine, text.drafting
        first = len(one.prompt_ids) + row - 1
        """Position of the last state that the target has computed."""
        stop = min(first + len(begun) + most + 1, drafting.keys.shape[2])
        kept = [buffer[:, :, first:stop].clone() for buffer in (drafting.keys, drafting.values)]
        state = text.states[first : first + 1]
        tokens = [one.ids[first + 1], *begun]
        added = 0
        try:
            for place in range(len(begun) + most):
                embedded = engine.embed(torch.tensor([tokens[place]], device=engine.device))
                state = drafting.run(head.enter(embedded, state), first + place)
                if place < len(begun):
                    continue
                token, sure = choose(engine.unembed(head.norm(state)), tokens[1:])
                tokens.append(token)
                added += 1
                if sure < threshold:
                    break
        finally:
            for buffer, before in zip((drafting.keys, drafting.values), kept, strict=True):
                buffer[:, :, first:stop] = before
        return added

    def _head(self, weights: DraftWeights) -> LeanEagle:
        if weights.path not in self._engine.draft_heads:
            raise ValueError(f"draft_weights: {weights.path} is not loaded; `LayerSkipModel.check_config` loads it")
        head: LeanEagle = self._engine.draft_heads[weights.path]
        return head

    def _text(self, weights: DraftWeights, i: int) -> _Text:
        key = (weights.path, i)
        if key not in self._known:
            engine, head = self._engine, self._head(weights)
            ids = torch.tensor(self._texts[i].ids, device=engine.device)
            with engine.session(len(ids)):
                engine.keep_states()
                engine.forward(ids)
                states = engine.states.clone()
            embedded = engine.embed(ids[1:])
            drafting = head.new_text(len(ids) + 64)
            drafting.run(head.enter(embedded, states[:-1]), 0)
            self._known[key] = _Text(states, embedded, drafting)
        return self._known[key]
