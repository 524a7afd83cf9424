"""WeightLayouts: whether a matrix is stored by its inputs or by its outputs, measured for each shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerskip.engines.recording.stopwatch import SecondsOf, Stopwatch

_FEW_ROWS = 5
"""A verification of four drafts. It counts half as much as products of one row, of which a round has more."""
_SMALLEST_BYTES = 1 << 17
"""Smaller matrices stay in a processor's own cache however they lie."""
_PASS_BYTES = {"cuda": 1 << 28}
"""Of the matrices that one timing goes through in turn, so that they come from memory as in decoding; else 4 MiB."""
_MOST_COPIES = 64
_MARGIN = {"cuda": 0.98}
"""The other layout must take less than this part of the first one's time, else 0.8: a CPU's timings scatter by tenths,
and a choice that changes from process to process helps nobody."""


class WeightLayouts:
    """Chooses between two layouts of a matrix in memory: by inputs (inputs, outputs), and by outputs as models have it.

    Which one a product with one row or a few reads faster depends on library, number format and shape: on the CPUs
    tried, float32 by inputs, large matrices in bfloat16 by outputs.

    Cost: a dozen products of each kind for the first matrix of a shape, and for that time two copies of it, or as many
    as 4 MiB hold (256 MiB on a GPU). Matrices of the same shape share the decision.
    """

    def __init__(self, device: torch.device, seconds_of: SecondsOf | None = None) -> None:
        self._device = device
        self._seconds_of = seconds_of or Stopwatch(device)
        self._by_outputs: dict[tuple[int, int], bool] = {}

    def arrange(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` (outputs, inputs) as (inputs, outputs), laid out in the faster way: a copy, or a view of it."""
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._by_outputs:
            self._by_outputs[shape] = weight.nbytes >= _SMALLEST_BYTES and self._is_faster_by_outputs(weight)
        return weight.t() if self._by_outputs[shape] else weight.t().contiguous()

    @property
    def any_by_outputs(self) -> bool:
        return any(self._by_outputs.values())

    @property
    def description(self) -> str:
        """In a few words, with the shapes (outputs × inputs) where they are not all alike."""
        named = [f"{outputs}×{inputs}" for (outputs, inputs), chosen in self._by_outputs.items() if chosen]
        if len(named) == len(self._by_outputs):
            return "weights by outputs"
        return f"weights by inputs, those of {', '.join(named)} by outputs" if named else "weights by inputs"

    def _is_faster_by_outputs(self, weight: torch.Tensor) -> bool:
        count = min(max(1, _PASS_BYTES.get(self._device.type, 1 << 22) // weight.nbytes), _MOST_COPIES)
        by_outputs = [weight.t(), *(weight.clone().t() for _ in range(count - 1))]
        by_inputs = [weight.t().contiguous() for _ in range(count)]
        works = [_products(by, rows) for by in (by_inputs, by_outputs) for rows in (1, _FEW_ROWS)]
        one, few, other_one, other_few = self._seconds_of(works)
        return 2 * other_one + other_few < _MARGIN.get(self._device.type, 0.8) * (2 * one + few)


def _products(weights: list[torch.Tensor], num_rows: int) -> Callable[[], None]:
    x = weights[0].new_ones((num_rows, weights[0].shape[0]))

    def multiply() -> None:
        for weight in weights:
            torch.mm(x, weight)

    return multiply
