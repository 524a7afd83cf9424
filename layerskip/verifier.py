"""Pure functions of tensors: how many draft tokens are accepted and which token follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerskip.sampling import Sampler


@dataclass(frozen=True)
class Verdict:
    """What verification decided about one round."""

    num_accepted: int
    next_token: int
    """The recovered token if a draft token was rejected, else the bonus token."""
    next_token_prob: float | None
    """The target's probability of `next_token`, which `target_threshold` looks at; None if not asked for."""


def verify_greedy(draft_ids: torch.Tensor, target_logits: torch.Tensor, *, with_prob: bool = True) -> Verdict:
    """Longest prefix of the draft that is the target's own choice, and the target's choice after it.

    Shapes: draft_ids (G,) int64, G may be 0; target_logits (G+1, V) float32, row i follows i draft tokens.
    Cost: one device sync.
    Raises: ValueError if the shapes do not fit.
    Ref: Leviathan et al. 2023 (2211.17192), the greedy case.
    """
    _check_shapes(draft_ids, target_logits)
    gamma = draft_ids.shape[0]
    best = target_logits.max(dim=-1)
    numbers = [draft_ids.double(), best.indices.double()]  # ids are exact in float64, and one read serves all
    if with_prob:
        numbers.append((best.values - target_logits.logsumexp(dim=-1)).exp().double())
    read: list[float] = torch.cat(numbers).tolist()
    drafted, chosen, probs = read[:gamma], read[gamma : 2 * gamma + 1], read[2 * gamma + 1 :]
    num_accepted = next((i for i in range(gamma) if drafted[i] != chosen[i]), gamma)
    return Verdict(num_accepted, int(chosen[num_accepted]), min(1.0, probs[num_accepted]) if with_prob else None)


def verify_sampled(
    draft_ids: torch.Tensor, draft_probs: torch.Tensor | None, target_probs: torch.Tensor, sampler: Sampler
) -> Verdict:
    """Speculative rejection sampling: emitted tokens follow `target_probs` whatever the draft proposed.

    Draft token i is kept with probability min(1, target / draft). The first rejected one is replaced by a draw from
    normalised max(target - draft, 0); after a full house the bonus token is drawn from the target's last row.

    Shapes: draft_ids (G,) int64, G may be 0; draft_probs (D, V), D at most G, the distributions that the last D tokens
    were drawn from; target_probs (G+1, V); rows sum to 1. A draft token without a distribution was certain to be
    proposed, so its draft probability is 1.
    Cost: two device syncs.
    Raises: ValueError if the shapes do not fit.
    Ref: Leviathan et al. 2023 (2211.17192) and Chen et al. 2023 (2302.01318), theorem 1 of each.
    """
    _check_shapes(draft_ids, target_probs)
    gamma = draft_ids.shape[0]
    vocabulary = target_probs.shape[-1]
    probs = target_probs[:0] if draft_probs is None else draft_probs
    num_certain = gamma - probs.shape[0]
    if num_certain < 0 or probs.shape[1:] != (vocabulary,):
        raise ValueError(f"draft_probs: must have at most {gamma} rows of {vocabulary}, got {tuple(probs.shape)}")
    index = draft_ids.unsqueeze(-1)
    draft_p = target_probs.new_ones(gamma)
    draft_p[num_certain:] = probs.gather(-1, index[num_certain:]).squeeze(-1)
    target_p = target_probs[:-1].gather(-1, index).squeeze(-1)
    # u * q < p, not u < p / q: no division by a draft probability that underflowed; u < 1 accepts p = q always.
    kept = sampler.uniform(gamma, target_probs.device) * draft_p < target_p
    num_accepted = int(kept.long().cumprod(0).sum())
    row = target_probs[num_accepted]
    if num_accepted == gamma:
        weights = row
    elif num_accepted >= num_certain:
        weights = recovery_weights(row, probs[num_accepted - num_certain])
    else:
        weights = recovery_weights(row, torch.zeros_like(row).scatter(0, draft_ids[num_accepted : num_accepted + 1], 1))
    token = int(sampler.draw(weights.unsqueeze(0)))
    return Verdict(num_accepted, token, float(row[token]))


def recovery_weights(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """max(target - draft, 0), unnormalised, of shape (V,); the target itself where rounding left nothing.

    A zero residual means that the two rows are equal, and then a rejection has probability zero: it only happens when
    the rows differ by less than a float32 step, where drawing from the target is right to the same rounding.
    """
    residual = (target_probs - draft_probs).clamp_min(0.0)
    return torch.where(residual.sum() > 0, residual, target_probs)


def _check_shapes(draft_ids: torch.Tensor, target_rows: torch.Tensor) -> None:
    if draft_ids.ndim != 1 or target_rows.ndim != 2 or target_rows.shape[0] != draft_ids.shape[0] + 1:
        raise ValueError(
            f"target: must have one row per draft token and one more, got {tuple(target_rows.shape)} for "
            f"{tuple(draft_ids.shape)} draft tokens"
        )
