"""Ways to compute attention in a recorded step: torch's own kernels by name, and one over chunks of the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Attention (1, H, R, D) of queries (1, H, R, D), keys and values (1, H, N, D), additive mask (R, N), scale."""
Part = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Sequence[torch.Tensor]]
"""Attention of (C, H, R, D), (C, H, N, D) twice, mask (C, H, R, N), scale: its output, and for every row the logarithm
of the sum of its scores' exponentials, (C, H, at least R)."""

_CHUNK = 256
"""Keys of one part of `split_keys`."""


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """By the kernel that torch takes."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def by_backend(backend: SDPBackend) -> Kernel:
    """The kernel of this backend alone. It raises RuntimeError where it does not serve."""

    def attend_by_it(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(queries, keys, values, mask, scale)

    return attend_by_it


def _efficient_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> Sequence[torch.Tensor]:
    # The function itself would not give the sums.
    parts: Sequence[torch.Tensor] = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, mask, compute_log_sumexp=True, scale=scale
    )
    return parts[:2]


def split_keys(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    part: Part = _efficient_part,
) -> torch.Tensor:
    """Attention over chunks of the keys side by side, their outputs weighted by what each chunk's scores add up to.

    With few rows a kernel that gives each head one block goes through the keys in series, on as many of a GPU's
    processors as there are heads; this gives a block to every head and chunk.

    Shapes: see `Kernel`. Raises: ValueError unless the keys are at least two chunks, and whole ones.
    """
    num_chunks, rest = divmod(keys.shape[2], _CHUNK)
    if rest or num_chunks < 2:
        raise ValueError(f"keys: must be two or more times {_CHUNK}, got {keys.shape[2]}")
    heads, rows, head_dim = queries.shape[1:]
    keys, values = (one[0].view(heads, num_chunks, _CHUNK, head_dim).transpose(0, 1) for one in (keys, values))
    # A chunk may be hidden from end to end, and softmax of nothing but -inf is not a number. This is as good as -inf:
    # beside a chunk with anything visible, its sum is zero.
    hidden = torch.finfo(mask.dtype).min / 2
    looks = mask.clamp_min(hidden).view(rows, num_chunks, _CHUNK).transpose(0, 1).unsqueeze(1)
    looks = looks.expand(-1, heads, -1, -1)
    outputs, sums = part(queries.expand(num_chunks, -1, -1, -1), keys, values, looks, scale)
    weights = sums[:, :, :rows].softmax(dim=0).unsqueeze(-1)
    return (outputs * weights).sum(dim=0, keepdim=True).to(queries.dtype)
