"""LayerSkipDrafter: the target's own weights under a skip mask, writing into the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from layerskip.drafters.base import Draft
from layerskip.engines.base import Engine
from layerskip.engines.prefix import PrefixEngine, PrefixStates
from layerskip.sampling import Sampler
from layerskip.skip_mask import SkipMask


class LayerSkipDrafter:
    """Autoregressive drafting under `skip_mask`.

    `draft_threshold`: drafting stops *after* the first token whose distribution has a top probability below it. The
    low-confidence token stays in the draft: dropping a token that was sampled, for a reason that depends on it, would
    shift the output distribution; and its forward is paid for already.

    Cost: one masked forward a token; one device sync a token with a threshold or a penalty, else none.
    """

    def __init__(self, engine: Engine, sampler: Sampler, skip_mask: SkipMask, draft_threshold: float = 0.0) -> None:
        self._engine = engine
        self._sampler = sampler
        self._mask = skip_mask
        self._threshold = draft_threshold

    def propose(self, context: Sequence[int], gamma: int, prefix: PrefixStates | None = None) -> Draft:
        engine, sampler = self._engine, self._sampler
        start = engine.cache.length
        token = torch.tensor([context[-1]], device=engine.device)
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        seen = list(context)
        needs_ids = sampler.params.repetition_penalty != 1.0
        for _ in range(gamma):
            logits = sampler.shape(self._forward(token, prefix), seen)
            if sampler.greedy:
                token = logits.max(dim=-1).indices
            else:
                rows.append(logits.softmax(dim=-1))
                token = sampler.draw(rows[-1])
            tokens.append(token)
            if needs_ids:
                seen.append(int(token))
            if self._threshold > 0.0 and float(_top_probability(logits)) < self._threshold:
                break
        engine.cache.rollback_to(start)
        return Draft(torch.cat(tokens), torch.cat(rows) if rows else None)

    def _forward(self, token: torch.Tensor, prefix: PrefixStates | None) -> torch.Tensor:
        if prefix is None:
            return self._engine.forward(token, self._mask)
        return cast(PrefixEngine, self._engine).draft_shared(token, self._mask, prefix)


def _top_probability(logits: torch.Tensor) -> torch.Tensor:
    """Largest softmax probability of a (1, V) row."""
    return (logits.max() - logits.logsumexp(-1)).exp()
