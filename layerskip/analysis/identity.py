"""Losslessness, checked: is an output the target's own, and where it differs, is that a tie in rounding?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from layerskip.huggingface.rounding import StockForward, is_reduced
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import Sampler, SamplingParams


@dataclass(frozen=True)
class IdentityReport:
    """Verdict on one output."""

    identical: bool
    is_tie: bool
    """Not identical, and every token is the target's choice within what rounding was measured to do."""
    first_difference: int | None = None
    """Index into the emitted tokens."""
    logit_gap: float | None = None
    """How far the worst token lies below the one to choose, in logits."""
    tolerance: float | None = None
    """The gap that rounding explains; see `RoundingSpread`."""

    @property
    def lossless(self) -> bool:
        return self.identical or self.is_tie


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Place of the first token in which two texts differ, the end of the shorter one included; None if none does."""
    pairs = enumerate(zip(ids, others, strict=False))
    at_end = None if len(ids) == len(others) else min(len(ids), len(others))
    return next((i for i, (one, other) in pairs if one != other), at_end)


def check_identity(
    model: LayerSkipModel,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    reference_ids: Sequence[int],
    sampler: Sampler | None = None,
) -> IdentityReport:
    """Compare `ids` with the target's own continuation `reference_ids`.

    sampler: what both were drawn with, its generator in the state before the first token; greedy without it.

    In float32 a difference is a difference. In bfloat16 and float16 forwards of one and of several positions round
    differently, so the first difference may be a tie between two tokens. Both texts are then held against the logits of
    Hugging Face's own forward, which shares no code with an engine: the reference's token where they part, and *every*
    emitted token, for the texts part there, must lie within the model's measured rounding of the best.

    That shows little of code that is wrong by less than rounding. The proof of the code is identity in float32.

    Cost: nothing if identical; else one forward over prompt and output, and in reduced precision, once a model, that of
    `measure_rounding` on this prompt.
    """
    first = first_difference(ids, reference_ids)
    if first is None:
        return IdentityReport(identical=True, is_tie=False)
    if not ids:
        return IdentityReport(identical=False, is_tie=False, first_difference=first)
    tolerance = model.rounding_spread([prompt_ids]).tolerance if is_reduced(model.dtype) else 0.0
    logits = StockForward(model.adapter).logits([*prompt_ids, *ids[:-1]], len(ids))
    chosen = torch.tensor(list(ids), device=logits.device)
    gaps = _gaps(logits, prompt_ids, chosen, sampler or Sampler(SamplingParams()), tolerance)
    worst = float(gaps.gather(-1, chosen.unsqueeze(-1)).max())
    parted = first < min(len(ids), len(reference_ids))
    if parted:
        worst = max(worst, float(gaps[first, reference_ids[first]]))
    return IdentityReport(
        identical=False,
        is_tie=is_reduced(model.dtype) and parted and worst <= tolerance,
        first_difference=first,
        logit_gap=worst,
        tolerance=tolerance,
    )


def _gaps(
    logits: torch.Tensor, prompt_ids: Sequence[int], ids: torch.Tensor, sampler: Sampler, tolerance: float
) -> torch.Tensor:
    """(T, V): how far each token lies below the one to choose, in logits (T, V) of a text's T new tokens.

    Of drawn tokens that is in logits plus the temperature's share of their noise. A token that top_k, top_p or min_p
    cut off lies below by its distance from the last one kept, if that is more; one kept by less than the tolerance is
    not held against others, since it might have been cut.
    """
    sampler.begin(len(prompt_ids))
    shaped = sampler.shape(logits, prompt_ids, ids[:-1])
    if sampler.greedy:
        return shaped.max(dim=-1, keepdim=True).values - shaped
    without_cuts = Sampler(replace(sampler.params, top_k=0, top_p=1.0, min_p=0.0))
    without_cuts.begin(len(prompt_ids))
    uncut = without_cuts.shape(logits, prompt_ids, ids[:-1])
    temperature = sampler.params.temperature
    scores = uncut - sampler.noise(len(prompt_ids), logits.shape[0], logits.shape[1], logits.device).log()
    kept = shaped.isfinite()
    last_kept = uncut.masked_fill(~kept, torch.inf).min(dim=-1, keepdim=True).values
    firm = uncut >= last_kept + (tolerance / temperature if bool((~kept).any()) else 0.0)
    best = scores.masked_fill(~firm, -torch.inf).max(dim=-1, keepdim=True).values
    return temperature * torch.maximum(best - scores, (last_kept - uncut).clamp_min(0.0))


def float32_command(
    model: str, *, device: str = "auto", trust_remote_code: bool = False, quantization: str | None = None
) -> str:
    """The command that proves the code on this model: in float32, where a difference is a difference."""
    flags = ["--device", device] * (device != "auto") + ["--trust-remote-code"] * trust_remote_code
    flags += [] if quantization is None else ["--quantization", quantization]
    return shlex.join(["python", "-m", "layerskip.doctor", model, *flags, "--dtype", "float32"])
