"""Losslessness, checked: is a greedy output the target's own, and where it differs, is that a tie in rounding?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from layerskip.model import LayerSkipModel

_ROUNDING_STEPS = 16
"""A logit is a long sum of rounded products; two that lie within this many rounding steps of the row's largest
magnitude may come out in either order, depending on how many positions a forward holds."""


@dataclass(frozen=True)
class IdentityReport:
    """Verdict on one greedy output."""

    identical: bool
    is_tie: bool
    """Not identical, and every emitted token is the target's choice within the dtype's rounding."""
    first_difference: int | None = None
    """Index into the emitted tokens."""
    logit_gap: float | None = None
    """How far the worst emitted token's logit lies below the best one's."""
    tolerance: float | None = None

    @property
    def lossless(self) -> bool:
        return self.identical or self.is_tie


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Place of the first token in which two texts differ, the end of the shorter one included; None if none does."""
    pairs = enumerate(zip(ids, others, strict=False))
    at_end = None if len(ids) == len(others) else min(len(ids), len(others))
    return next((i for i, (one, other) in pairs if one != other), at_end)


def check_greedy(
    model: LayerSkipModel, prompt_ids: Sequence[int], ids: Sequence[int], reference_ids: Sequence[int]
) -> IdentityReport:
    """Compare `ids` with the target's own greedy continuation `reference_ids`.

    In float32 a difference is a difference. In bfloat16 and float16 the first difference may be a tie between two
    logits; the texts part there, so *every* emitted token is then checked against the target's logits after the tokens
    before it, and all must lie within the dtype's rounding of the best.

    Cost: nothing if identical; else one forward over prompt and output. Applies to greedy decoding without a penalty.
    """
    first = first_difference(ids, reference_ids)
    if first is None:
        return IdentityReport(identical=True, is_tie=False)
    if not ids:
        return IdentityReport(identical=False, is_tie=False, first_difference=first)
    logits = model.target_logits([*prompt_ids, *ids[:-1]], num_logits=len(ids)).float()
    chosen = logits.gather(-1, torch.tensor(ids, device=logits.device).unsqueeze(-1)).squeeze(-1)
    gaps = logits.max(dim=-1).values - chosen
    tolerances = _ROUNDING_STEPS * torch.finfo(model.dtype).eps * logits.abs().max(dim=-1).values
    worst = int((gaps - tolerances).argmax())
    ended_alike = first < min(len(ids), len(reference_ids))
    reduced = model.dtype in (torch.bfloat16, torch.float16)
    return IdentityReport(
        identical=False,
        is_tie=reduced and ended_alike and bool((gaps <= tolerances).all()),
        first_difference=first,
        logit_gap=float(gaps[worst]),
        tolerance=float(tolerances[worst]),
    )


def logit_difference(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(relative difference in norm, the most that rounding explains) of the same rows computed in two ways.

    The limit is sqrt(eps) of the dtype: 3e-4 in float32, .03 in float16, .09 in bfloat16. A wrong position, sign or
    window gives tenths; rounding through some dozen layers stays an order of magnitude below the limit.
    """
    tolerance = float(torch.finfo(reference.dtype).eps ** 0.5)
    logits, reference = logits.float(), reference.float()
    return float((logits - reference).norm() / reference.norm().clamp_min(1e-30)), tolerance
