"""How far lossy outputs lie from the target's own: measured under Hugging Face's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.config.lossy_acceptance import Distance
from layerskip.huggingface.rounding import StockForward
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import SamplingParams, seeded_sampler


@dataclass(frozen=True)
class Emitted:
    """One prompt's output and the target's own continuation of it."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    target_ids: Sequence[int]
    seed: int = 0
    """What both were drawn from, where tokens are sampled."""


def measure_distance(model: LayerSkipModel, outputs: Sequence[Emitted], params: SamplingParams) -> Distance:
    """All tokens of these outputs count alike.

    In bfloat16 and float16 a token may differ from the target's choice by rounding alone, and is counted too.
    Cost: a forward over each prompt and output, and one over each prompt and continuation of the target's.
    Raises: ValueError without an output.
    """
    if not outputs:
        raise ValueError("outputs: must be at least one, got none")
    emitted = [_score(model, one, one.ids, params) for one in outputs]
    own = [_score(model, one, one.target_ids, params) for one in outputs]
    return Distance(
        unlike_share=float(torch.cat([unlike for unlike, _ in emitted]).double().mean()),
        log_prob=float(torch.cat([log_probs for _, log_probs in emitted]).mean()),
        target_log_prob=float(torch.cat([log_probs for _, log_probs in own]).mean()),
    )


def _score(
    model: LayerSkipModel, output: Emitted, ids: Sequence[int], params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token (T,): whether the target would have chosen another one there, and its log-probability."""
    start = len(output.prompt_ids)
    logits = StockForward(model.adapter).logits([*output.prompt_ids, *ids[:-1]], len(ids))
    tokens = torch.tensor(list(ids), device=logits.device)
    sampler = seeded_sampler(params, output.seed, logits.device)
    sampler.begin(start)
    chosen = sampler.choose(sampler.shape(logits, output.prompt_ids, tokens[:-1]), start)
    log_probs = logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (chosen != tokens).cpu(), log_probs.double().cpu()
