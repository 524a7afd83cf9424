"""TokenLogprobs: how likely the model holds a token that was chosen, and which are likelier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_LOGPROBS = 20
"""Likeliest tokens of a place, as OpenAI's API and vLLM allow."""


@dataclass(frozen=True)
class TokenLogprobs:
    """At a token's place, by the model alone: before penalties, biases, grammar, temperature and cuts."""

    logprob: float
    """Its natural log-probability."""
    top: tuple[tuple[int, float], ...] = ()
    """Token ids with theirs, the likeliest first."""


def token_logprobs(logits: torch.Tensor, ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of chosen tokens (T,) and of the `count` likeliest at each place, from logits (at least T, V) of any dtype.

    Cost: passes over T rows of the vocabulary, and a device sync.
    """
    found = logits[: len(ids)].float().log_softmax(dim=-1)
    own = found.gather(-1, torch.tensor([list(ids)], device=logits.device).T).squeeze(-1).tolist()
    best = found.topk(min(count, found.shape[-1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(one, tuple(zip(*top, strict=True))) for one, top in zip(own, tops, strict=True)]
