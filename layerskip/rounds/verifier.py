"""How many draft tokens are accepted and which token follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.config.lossy_acceptance import LossyAcceptance, ProbabilityAcceptance
from layerskip.rounds.logprobs import TokenLogprobs
from layerskip.rounds.sampling import Sampler, chosen_probability


@dataclass(frozen=True)
class Verdict:
    """What verification decided about one round."""

    num_accepted: int
    next_token: int
    """The recovered token if a draft token was rejected, else the bonus token."""
    next_token_prob: float | None
    """The target's probability of `next_token`, which `target_threshold` looks at; None if not asked for."""
    off_draft: tuple[TreeToken, ...] = ()
    """The accepted tokens after the first wrong draft token, those of another branch of the tree."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of the accepted tokens and the next one, where the sampler says them."""

    def emitted(self, draft_ids: Sequence[int]) -> list[int]:
        """The accepted tokens, of this draft or off it, and the next one."""
        return [*draft_ids[: self.num_drafts_accepted], *(one.token for one in self.off_draft), self.next_token]

    @property
    def rows(self) -> list[int]:
        """Of the verification, those that the accepted tokens and the next one were chosen by."""
        return [*range(self.num_drafts_accepted + 1), *(one.row for one in self.off_draft)]

    @property
    def num_drafts_accepted(self) -> int:
        """Accepted tokens of the draft itself, which come before those of another branch."""
        return self.num_accepted - len(self.off_draft)


@dataclass(frozen=True)
class TreeToken:
    """One that the target chose."""

    token: int
    row: int
    """Among all rows of the verification."""


@dataclass(frozen=True, eq=False)
class TreeDraft:
    """Tokens to verify in one forward, of the draft and of other branches."""

    ids: torch.Tensor
    """(R - 1,) int64, row by row after the first: those of the draft that are verified, then the others, each after
    what it goes on from."""
    parents: tuple[int, ...]
    """See `DraftTree`."""
    num_drafts: int
    """Of these tokens, those of the draft itself."""

    @property
    def num_siblings(self) -> int:
        """Tokens of other branches."""
        return len(self.parents) - self.num_drafts


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
    tree: TreeDraft,
    logits: torch.Tensor,
    sampler: Sampler,
    context: Sequence[int],
    *,
    with_prob: bool = True,
    lossy: LossyAcceptance | None = None,
) -> Verdict:
    """`verify` of the draft; from where that is wrong on, the branch that the target chooses, as far as there is one.

    The target chooses as ever, and what is not of the draft is accepted only if it is that choice. lossy: as in
    `verify`, of the draft alone.

    Shapes: logits (R, V), not shaped, row by row. Cost: one device sync, a second where not all of the draft is right,
    and one for each accepted token of another branch.
    """
    draft_ids = tree.ids[: tree.num_drafts]
    chain = sampler.shape(logits[: tree.num_drafts + 1], context, draft_ids)
    verdict = verify(draft_ids, chain, sampler, len(context), with_prob=with_prob, lossy=lossy)
    if verdict.num_accepted == tree.num_drafts:
        return verdict
    row, nothing, ids = verdict.num_accepted, draft_ids[:0], tree.ids.tolist()
    accepted, found = ids[:row], list[TreeToken]()
    rows = {(parent, token): place for place, (parent, token) in enumerate(zip(tree.parents, ids, strict=True), 1)}
    token, prob = verdict.next_token, verdict.next_token_prob
    while (row := rows.get((row, token), 0)) > tree.num_drafts:
        found.append(TreeToken(token, row))
        so_far = [*context, *accepted, *(one.token for one in found)]
        shaped = sampler.shape(logits[row : row + 1], so_far)
        after = verify(nothing, shaped, sampler, len(so_far), with_prob=with_prob)
        token, prob = after.next_token, after.next_token_prob
    return Verdict(verdict.num_accepted + len(found), token, prob, tuple(found))
