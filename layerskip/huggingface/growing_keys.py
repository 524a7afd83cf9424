"""Attention over keys whose number changes from one forward to the next: what of torch may compute it, and how."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TORCHS_CHOICE = "torch's choice"
WITHOUT_CUDNN = "torch's choice without cudnn"
FEW_ROWS = 16
"""Up to as many queries at once are folded, see `attend_folded`; of more that gains nothing."""
_SDPA = "sdpa"


def attend_folded(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attention (B, query heads, T, head_dim) over (B, key heads, keys, head_dim), not causal.

    Query heads that share a key head become more queries of it (`folded`), so that its keys and values are read once.
    Where they stay heads, a CPU reads them for each in turn, and in bfloat16 computes a single query without its matrix
    product, which takes up to eight times as long; a query alone is therefore computed twice.

    mask: None = all, or boolean or additive, of the T rows or of the folded ones, (..., rows, keys).
    """
    by_head = folded(queries, keys.shape[1])
    num_rows = by_head.shape[2]
    if mask is not None and mask.shape[-2] < num_rows:
        mask = mask.repeat(*[1] * (mask.dim() - 2), num_rows // queries.shape[2], 1)
    if num_rows == 1 and _lacks_product(by_head):
        by_head = by_head.repeat(1, 1, 2, 1)
    attended = F.scaled_dot_product_attention(by_head, keys, values, attn_mask=mask, scale=scale)
    return attended.narrow(2, 0, num_rows).reshape(*queries.shape[:3], values.shape[3])


def _lacks_product(queries: torch.Tensor) -> bool:
    """Whether torch computes one of these alone without its matrix product."""
    return queries.dtype != torch.float32 and queries.device.type == "cpu"


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask, True = visible, as attention computes with it: 0, and -inf elsewhere. Made once it serves all
    layers, where each would turn a boolean one into this anew."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def folded(queries: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(B, key heads, query heads / key heads * T, head_dim) of queries (B, query heads, T, head_dim)."""
    num_texts, num_queries, num_rows, head_dim = queries.shape
    return queries.reshape(num_texts, num_keys, num_queries // num_keys * num_rows, head_dim)


@contextmanager
def over_growing_keys(devices: Collection[torch.device]) -> Iterator[None]:
    """Around forwards on these devices.

    On Hopper GPUs scaled-dot-product attention takes cuDNN's kernel first (torch 2.11 with cuDNN 9.15 and later), which
    makes a plan of some 30 ms for every new shape: for every token here. Not by `sdpa_kernel`, which costs tens of
    microseconds, as much as a layer. On a CPU the library's modules compute a few queries by `attend_folded`. As all of
    torch's and the library's attention settings, both are the process's: other threads see them.
    """
    cudnn = _any(devices, "cuda") and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    # What a user has put in the place of the library's own is left there.
    folds = _any(devices, "cpu") and ALL_ATTENTION_FUNCTIONS[_SDPA] is sdpa_attention_forward
    if cudnn:
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if folds:
        ALL_ATTENTION_FUNCTIONS[_SDPA] = _attend_in_modules
    try:
        yield
    finally:
        if cudnn:
            torch.backends.cuda.enable_cudnn_sdp(enabled=True)
        if folds:
            ALL_ATTENTION_FUNCTIONS[_SDPA] = sdpa_attention_forward


def _attend_in_modules(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """In the place of the library's own: a few queries by `attend_folded`, all else as it was."""
    num_rows = query.shape[2]
    others = [kwargs.get(name) for name in ("position_bias", "softcap", "cache")]
    # Several queries without a mask would be causal; a mask for each head cannot be folded.
    serves = num_rows == 1 if attention_mask is None else num_rows <= FEW_ROWS and attention_mask.shape[1] == 1
    gains = query.shape[1] > key.shape[1] or (num_rows == 1 and _lacks_product(query))
    if not gains or query.device.type != "cpu" or dropout or not serves or any(one is not None for one in others):
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return found
    return attend_folded(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def growing_keys_backend(devices: Collection[torch.device]) -> str:
    """What `over_growing_keys` leaves to compute attention."""
    return WITHOUT_CUDNN if _any(devices, "cuda") else TORCHS_CHOICE


def _any(devices: Collection[torch.device], kind: str) -> bool:
    return any(device.type == kind for device in devices)
