"""Linear: a product with a matrix, in one of the forms that a weight can be kept in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Linear(Protocol):
    """x (T, inputs) to (T, outputs)."""

    @property
    def num_outputs(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + product, in one operation where there is one."""
        ...


class MakeLinear(Protocol):
    """Of weights (outputs, inputs), whose outputs are to follow each other, and a bias (outputs,) or none; order: in
    which they are to follow, if not in their own. What it makes may share a weight's memory."""

    def __call__(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, order: torch.Tensor | None = None, /
    ) -> Linear: ...


def fused(make: MakeLinear, *modules: nn.Linear, order: torch.Tensor | None = None) -> Linear:
    """One product in place of several of the same input; order: see `MakeLinear`."""
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return make([module.weight.detach() for module in modules], torch.cat(biases) if biases else None, order)


def joined(weights: Sequence[torch.Tensor], order: torch.Tensor | None = None) -> torch.Tensor:
    """One matrix (outputs, inputs); a single one in its own order is itself."""
    return reordered(weights[0] if len(weights) == 1 else torch.cat(list(weights)), order)


def reordered(outputs: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return outputs if order is None else outputs[order]


@dataclass(frozen=True)
class DenseLinear:
    """A matrix (inputs, outputs), stored by its inputs or, as a view, by its outputs.

    In bfloat16 and float16 torch lets a GPU's products add up parts in reduced precision
    (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`), so that one row and several differ a little
    more. It is left as it is: it is the process's setting, the model's own `generate` is compared under the same one,
    and what it costs in speed or gains in ties has not been measured.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.addmm(residual, x, self.weight)
        return out if self.bias is None else out.add_(self.bias)

    def first(self, count: int) -> DenseLinear:
        """Of the first so many outputs, in the same memory."""
        return DenseLinear(self.weight[:, :count], None if self.bias is None else self.bias[:count])


_FEWEST = 4
"""Rows that a product of fewer is filled up to: oneDNN's kernels for one to three rows in float32 take longer."""
_MOST_EXACT = 32
_LEAST_STEP = 16


def rows_of_product(num_rows: int) -> int:
    """What a prompt's rows are filled up to: at most a sixteenth more, or to the next sixteenth row.

    oneDNN makes a kernel for each matrix and number of rows and keeps the latest 1,024 of them, each with memory of its
    own. A server whose prompts have every length would have as many.
    """
    if num_rows <= _MOST_EXACT:
        return num_rows
    step = max(_LEAST_STEP, 1 << num_rows.bit_length() - 5)
    return -(-num_rows // step) * step


class PackedLinear:
    """A matrix in the blocks that oneDNN's kernels read, on a CPU.

    Library calls on a matrix as it is pack it anew for every product of a few rows, which takes longer than the
    product: on the CPUs tried four rows took two to four times as long as one, and packed once hardly longer.

    one_row: what computes products of one row instead, where that is faster.
    Cost: a copy of the weight. The operators are those that torch.compile packs weights with.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, pads: bool, one_row: Linear | None = None
    ) -> None:
        """weight: (outputs, inputs), which is copied. pads: fill products of fewer than four rows up."""
        self.num_outputs = weight.shape[0]
        # Made for many rows: the blocks that serve one row best make the others slower.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self._bias, self._pads, self._one_row = bias, pads, one_row

    @staticmethod
    def serves(weight: torch.Tensor) -> bool:
        """Whether torch has the operators here, and oneDNN the number format on this CPU."""
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows == 1 and self._one_row is not None:
            return self._one_row(x)
        filled = _FEWEST if self._pads and num_rows < _FEWEST else rows_of_product(num_rows)
        if filled > num_rows:
            x = F.pad(x, (0, 0, 0, filled - num_rows))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out[:num_rows]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1 and self._one_row is not None:
            return self._one_row.add_to(residual, x)
        return self(x).add_(residual)
