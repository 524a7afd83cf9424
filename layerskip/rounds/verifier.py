"""How many draft tokens are accepted and which token follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.config.lossy_acceptance import LossyAcceptance, ProbabilityAcceptance
from layerskip.rounds.sampling import Sampler, chosen_probability


@dataclass(frozen=True)
class Verdict:
    """What verification decided about one round."""

    num_accepted: int
    next_token: int
    """The recovered token if a draft token was rejected, else the bonus token."""
    next_token_prob: float | None
    """The target's probability of `next_token`, which `target_threshold` looks at; None if not asked for."""
    sibling: Sibling | None = None
    """The last of the accepted tokens, where that is not the one drafted there but a sibling of it."""

    @property
    def num_drafts_accepted(self) -> int:
        """Accepted tokens before a sibling: those that were drafted."""
        return self.num_accepted - (self.sibling is not None)


@dataclass(frozen=True)
class Sibling:
    """One that the target chose."""

    token: int
    row: int
    """Among all rows of the verification."""


@dataclass(frozen=True, eq=False)
class Siblings:
    """Tokens to verify besides, each in the place of a drafted one."""

    ids: torch.Tensor
    """(B, k) int64: of each draft that has any."""
    branches: tuple[int, ...]
    """Which of the drafts have, (B,), counted from 0, ascending."""


def verify(
    draft_ids: torch.Tensor,
    target_logits: torch.Tensor,
    sampler: Sampler,
    place: int,
    *,
    with_prob: bool = True,
    lossy: LossyAcceptance | None = None,
) -> Verdict:
    """Longest prefix of the draft that is the target's own choice, and the target's choice after it.

    The target chooses at every place as it would alone (`Sampler`), greedily or by that place's own random numbers, so
    the output is the target's whatever is proposed. Of a drawn token, a draft q is accepted with a probability between
    (1 - d) / (1 + d) and 1 - d, d being the total variation distance between q and the target; 1 - d, what rejection
    sampling (Leviathan et al. 2023, 2211.17192) reaches, is met by a draft that is certain to be proposed.
    lossy: a rule by which draft tokens are accepted that are not the target's choice; what follows the last accepted
    one is the target's choice all the same.

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
    if lossy is not None:
        near = accepts(lossy, target_logits[:gamma], draft_ids)
        best = torch.cat([torch.where(near, draft_ids, best[:gamma]), best[gamma:]])
    numbers = [draft_ids.double(), best.double()]  # ids are exact in float64, and one read serves all
    if with_prob:
        numbers.append(chosen_probability(target_logits, best).double())
    read: list[float] = torch.cat(numbers).tolist()
    drafted, chosen, probs = read[:gamma], read[gamma : 2 * gamma + 1], read[2 * gamma + 1 :]
    num_accepted = next((i for i in range(gamma) if drafted[i] != chosen[i]), gamma)
    return Verdict(num_accepted, int(chosen[num_accepted]), min(1.0, probs[num_accepted]) if with_prob else None)


def accepts(rule: LossyAcceptance, shaped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(T,) bool: which of the tokens (T,) the rule accepts by the target's shaped logits (T, V); greedy ones are shaped
    by the repetition penalty alone."""
    probs = shaped.softmax(dim=-1)
    own = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if isinstance(rule, ProbabilityAcceptance):
        return own >= rule.threshold
    entropy: torch.Tensor = torch.special.entr(probs).sum(dim=-1)
    return own > (rule.delta * (-entropy).exp()).clamp_max(rule.epsilon)


def verify_tree(
    draft_ids: torch.Tensor,
    siblings: Siblings,
    logits: torch.Tensor,
    sampler: Sampler,
    context: Sequence[int],
    *,
    with_prob: bool = True,
    lossy: LossyAcceptance | None = None,
) -> Verdict:
    """`verify`; and where the target chose a sibling of the first wrong draft token, that and what it chooses after it.

    The target chooses as ever, and a sibling is accepted only if it is that choice. lossy: as in `verify`, of the draft
    tokens alone.

    Shapes: draft_ids (G,) int64; logits (1 + G + B * k, V), not shaped: those of the drafts, as in `verify`, then row
    by row those that follow each sibling. Cost: one device sync, a second where a draft token that has siblings is
    wrong, a third where a sibling is right.
    """
    num_drafts, count = len(draft_ids), siblings.ids.shape[1]
    chain = sampler.shape(logits[: num_drafts + 1], context, draft_ids)
    verdict = verify(draft_ids, chain, sampler, len(context), with_prob=with_prob, lossy=lossy)
    place = verdict.num_accepted
    if place not in siblings.branches:
        return verdict
    branch = siblings.branches.index(place)
    others: list[int] = siblings.ids[branch].tolist()
    if verdict.next_token not in others:
        return verdict
    token = verdict.next_token
    row = 1 + num_drafts + branch * count + others.index(token)
    so_far = [*context, *draft_ids[:place].tolist(), token]
    after = verify(
        draft_ids[:0], sampler.shape(logits[row : row + 1], so_far), sampler, len(so_far), with_prob=with_prob
    )
    return Verdict(place + 1, after.next_token, after.next_token_prob, Sibling(token, row))
