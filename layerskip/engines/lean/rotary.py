"""Rotary positions of lean layers: which rotation a layer has, and cosines and sines by position."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

Rotation = str | None
"""Which rotation a layer has, by the name that the model's rotary embedding knows it by; empty where there is but one,
None: none."""
RotaryRows = Mapping[Rotation, tuple[torch.Tensor, torch.Tensor]]
"""Of each rotation cosines and signed sines (positions, 1, head_dim)."""


def rotation_of(rotary: Any, layer: Any, window: int | None) -> Rotation:
    """That of a decoder layer; window: of its sliding attention, if it slides."""
    if rotary is None or not getattr(layer.self_attn, "use_rope", True):
        return None
    if not getattr(rotary, "layer_types", None):
        return ""
    return "full_attention" if window is None else "sliding_attention"


def num_rotated(rotary: Any, rotation: Rotation) -> int | None:
    """How many numbers of a head are rotated, the first ones; None: none."""
    if rotation is None:
        return None
    return 2 * len(getattr(rotary, f"{rotation}_inv_freq" if rotation else "inv_freq"))


def rotary_tables(rotary: Any, like: torch.Tensor, num_positions: int, head_dims: Mapping[Rotation, int]) -> RotaryRows:
    """Of these rotations, at positions 0..num_positions-1. head_dims: of the layers that have each."""
    tables: dict[Rotation, tuple[torch.Tensor, torch.Tensor]] = {}
    for one, head_dim in head_dims.items():
        if one is None:
            cos = like.new_ones((num_positions, 1, head_dim))
            tables[one] = (cos, torch.zeros_like(cos))
        else:
            of_one = partial(rotary, layer_type=one) if one else rotary
            tables[one] = rotary_table(of_one, like, num_positions, head_dim)
    return tables


def rotary_rows(tables: RotaryRows, at: slice | torch.Tensor) -> RotaryRows:
    """At some positions; a tensor of them lies where the tables do."""
    return {name: (cos[at], sin[at]) for name, (cos, sin) in tables.items()}


def text_positions(rotary: Any, count: int, device: torch.device) -> torch.Tensor:
    """(1, count) as a model's rotary embedding takes the first positions of a text; (3, 1, count) where it has axes of
    time, height and width, on which a text's are the same."""
    positions = torch.arange(count, device=device).unsqueeze(0)
    return positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions


def rotary_table(
    rotary: Any, like: torch.Tensor, num_positions: int, head_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for positions 0..num_positions-1, each (num_positions, 1, head_dim).

    head_dim: where fewer numbers of a head are rotated; the others stand as `rotated_halves` has them, and stay.
    """
    cos, sin = rotary(like, text_positions(rotary, num_positions, like.device))
    half = cos.shape[-1] // 2
    # rotate_half negates the first half after the swap; the sign lives in the table instead.
    parts = [(cos[0, :, :half], -sin[0, :, :half]), (cos[0, :, half:], sin[0, :, half:])]
    if head_dim is not None:
        pad = (0, head_dim // 2 - half)
        parts = [(F.pad(one, pad, value=1.0), F.pad(other, pad)) for one, other in parts]
    cosines, sines = (torch.cat(list(both), dim=-1) for both in zip(*parts, strict=True))
    return cosines.unsqueeze(1), sines.unsqueeze(1)


def rotated_halves(head_dim: int, num_rotated: int) -> torch.Tensor:
    """The order of a head's numbers in which half a head lies between those that are rotated with each other."""
    halves = torch.arange(num_rotated).view(2, -1)
    still = torch.arange(num_rotated, head_dim).view(2, -1)
    return torch.cat([halves, still], dim=1).flatten()
