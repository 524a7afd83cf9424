"""How many draft tokens are accepted and which token follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerskip.rounds.sampling import Sampler, chosen_probability


@dataclass(frozen=True)
class Verdict:
    """What verification decided about one round."""

    num_accepted: int
    next_token: int
    """The recovered token if a draft token was rejected, else the bonus token."""
    next_token_prob: float | None
    """The target's probability of `next_token`, which `target_threshold` looks at; None if not asked for."""


def verify(
    draft_ids: torch.Tensor, target_logits: torch.Tensor, sampler: Sampler, place: int, *, with_prob: bool = True
) -> Verdict:
    """Longest prefix of the draft that is the target's own choice, and the target's choice after it.

    The target chooses at every place as it would alone (`Sampler`), greedily or by that place's own random numbers, so
    the output is the target's whatever is proposed. Of a drawn token, a draft q is accepted with a probability between
    (1 - d) / (1 + d) and 1 - d, d being the total variation distance between q and the target; 1 - d, what rejection
    sampling (Leviathan et al. 2023, 2211.17192) reaches, is met by a draft that is certain to be proposed.

    Shapes: draft_ids (G,) int64, G may be 0; target_logits (G+1, V) float32, shaped, row i follows i draft tokens.
    place: of the first draft token in the text. Cost: one device sync.
    Raises: ValueError if the shapes do not fit.
    Ref: Daliri, Musco and Suresh 2024 (2408.07978).
    """
    if draft_ids.ndim != 1 or target_logits.ndim != 2 or target_logits.shape[0] != draft_ids.shape[0] + 1:
        raise ValueError(
            f"target: must have one row per draft token and one more, got {tuple(target_logits.shape)} for "
            f"{tuple(draft_ids.shape)} draft tokens"
        )
    gamma = draft_ids.shape[0]
    best = sampler.choose(target_logits, place)
    numbers = [draft_ids.double(), best.double()]  # ids are exact in float64, and one read serves all
    if with_prob:
        numbers.append(chosen_probability(target_logits, best).double())
    read: list[float] = torch.cat(numbers).tolist()
    drafted, chosen, probs = read[:gamma], read[gamma : 2 * gamma + 1], read[2 * gamma + 1 :]
    num_accepted = next((i for i in range(gamma) if drafted[i] != chosen[i]), gamma)
    return Verdict(num_accepted, int(chosen[num_accepted]), min(1.0, probs[num_accepted]) if with_prob else None)
