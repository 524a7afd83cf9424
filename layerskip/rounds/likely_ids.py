"""Of a row of many logits on a CPU the few ids that matter, found without sorting all.

A row is looked at as a whole only where that is a pass over it; whatever is slower is done to the ids that such a pass
leaves. What `generate` does sorts a whole vocabulary for `top_p`: with Gemma 3 270M that takes as long as decoding the
token (`python -m studies.engine.sampling`).
"""

from __future__ import annotations

import math

import torch

from layerskip.config.sampling_params import SamplingParams
from layerskip.rounds.rows import RowKernels, row_kernels

_LARGE = 1 << 13
"""Ids from which on that is worth it."""
_STACKED = 64
"""Ids whose largest logit is looked at first."""
_TRIED = (64, 1024)
"""Ids that `top_p` is looked for among before all of them are sorted."""


def is_large(logits: torch.Tensor) -> bool:
    """Whether rows (..., V) are to be looked at so; not on a GPU, which sorts fast and would be waited for."""
    return logits.device.type == "cpu" and logits.shape[-1] >= _LARGE


def check_possible(ids: torch.Tensor) -> None:
    """Raises: ValueError where there are none, because logits are no numbers."""
    if not len(ids):
        raise ValueError("logits: no token is possible, they are NaN: look at the model's weights and number format")


def _kernels_for(row: torch.Tensor) -> RowKernels | None:
    return row_kernels() if row.dtype == torch.float32 and row.is_contiguous() else None


def likeliest_ids(row: torch.Tensor, count: int) -> torch.Tensor:
    """(n,) int64, ascending: of a row (V,) the `count` likeliest ids, and those as likely as the last of them; perhaps
    some more, and fewer where no more are possible."""
    if (kernels := _kernels_for(row)) is not None:
        return kernels.likeliest(row, count, -math.inf)
    highest = _highest(row)
    if count >= len(highest):
        return _where(row > -math.inf)
    # As many ids as these are at least as likely as the last of them.
    return _at_least(row, highest, float(highest.topk(count).values[-1]))


def ids_at_least(row: torch.Tensor, least: float) -> torch.Tensor:
    """(n,) int64, ascending: of a row (V,) the possible ids whose logits are no smaller."""
    if (kernels := _kernels_for(row)) is not None:
        return kernels.likeliest(row, len(row), least)
    return _at_least(row, _highest(row), least)


def _highest(row: torch.Tensor) -> torch.Tensor:
    """(W,): the largest logit of the ids i, i + W, i + 2 W, and so on."""
    width = -(-len(row) // _STACKED)
    whole = len(row) // width * width
    highest = row[:whole].view(-1, width).amax(dim=0)
    rest = row[whole:]
    highest[: len(rest)] = torch.maximum(highest[: len(rest)], rest)
    return highest


def _at_least(row: torch.Tensor, highest: torch.Tensor, least: float) -> torch.Tensor:
    if least == -math.inf:
        return _where(row > least)
    width, columns = len(highest), _where(highest >= least)
    if len(columns) > width // _STACKED:
        return _where(row >= least)
    ids = (columns + torch.arange(0, len(row), width).unsqueeze(1)).flatten()  # ascending
    if len(row) % width:
        ids = ids[ids < len(row)]
    return ids[row[ids] >= least]


def shape_row(logits: torch.Tensor, params: SamplingParams, row: torch.Tensor) -> torch.Tensor:
    """(n,) int64, ascending: those ids of logits (V,) that `top_k`, `top_p` and `min_p` leave, as `generate` has it; up
    to rounding where a probability is compared, and of equally likely ids at the edge of `top_p` the later ones, where
    it leaves that open. In `row` (V,), to which the logits at their temperature go, they alone are possible."""
    kernels, likeliest = _kernels_for(logits), None
    if kernels is not None and params.top_k:
        likeliest = kernels.likeliest(logits, params.top_k, -math.inf, params.temperature, row)
    else:
        torch.div(logits, params.temperature, out=row)
        if params.top_k:
            likeliest = likeliest_ids(row, params.top_k)
    ids = _possible(row, params, likeliest)
    if kernels is not None:
        kernels.leave_only(row, ids)
    else:
        own = row[ids]
        row.fill_(-math.inf).index_copy_(0, ids, own)
    return ids


def _possible(row: torch.Tensor, params: SamplingParams, ids: torch.Tensor | None) -> torch.Tensor:
    """ids: with a `top_k` those that it leaves are among them."""
    if ids is not None:
        check_possible(ids)
        own = row[ids]
        ids = ids[own >= own.topk(min(params.top_k, len(own))).values[-1]]
    if params.top_p < 1.0:
        ids = _nucleus(row, params.top_p) if ids is None else ids[_first_of(row[ids], params.top_p)]
    if params.min_p > 0.0:
        least = float(row.max()) + math.log(params.min_p)
        ids = ids_at_least(row, least) if ids is None else ids[row[ids] >= least]
    return _where(row > -math.inf) if ids is None else ids


def _nucleus(row: torch.Tensor, top_p: float) -> torch.Tensor:
    total = row.logsumexp(dim=0)
    for count in (*_TRIED, len(row)):
        ids = likeliest_ids(row, count)
        check_possible(ids)
        kept = _first_of(row[ids], top_p, total)
        if len(kept) < len(ids):
            break
    return ids[kept]


def _first_of(logits: torch.Tensor, top_p: float, total: torch.Tensor | None = None) -> torch.Tensor:
    """Places, ascending, of the fewest likeliest of these logits (n,) that have a probability of `top_p` together. Of
    equal ones the later come first. total: the logarithm of what all weigh, of these alone without it."""
    sorted_ones, order = logits.flip(0).sort(descending=True, stable=True)
    total = logits.logsumexp(dim=0) if total is None else total
    probs = (sorted_ones - total).exp().double()
    before = probs.cumsum(dim=0) - probs
    is_kept = before < top_p
    is_kept[0] = True
    return (len(logits) - 1 - order[is_kept]).sort().values


def _where(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().squeeze(-1)
