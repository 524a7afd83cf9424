"""Int8Modules: a model's own modules, for a while with 8-bit weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.quantization.products import check_room, int8_linear


class Int8Modules:
    """A model's linear modules in its decoder layers, and its output embedding, with 8-bit weights for a while.

    Cost: see `Int8Linear` and `GpuInt8Linear`; made at the first draft. What is no linear module, as a mixture's
    experts in one tensor, stays as it is.
    """

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module) -> None:
        self._layers, self._head = layers, head
        self._twins: list[tuple[nn.Module, _Twin]] = []
        self._heads: dict[tuple[int | None, str | None], _Twin] = {}

    def make(self, mask: SkipMask, rows: torch.Tensor | slice) -> int:
        """Of what drafts under this mask need, with these rows of the output embedding, what is not there yet; returns
        how many it made."""
        made = 0
        if not self._twins:
            modules: list[Any] = [one for layer in self._layers for one in layer.modules() if _is_linear(one)]
            check_room([one.weight for one in modules])
            self._twins = [(one, _Twin(one)) for one in modules]
            made += 1
        key = (mask.draft_vocab, mask.draft_ids)
        if key not in self._heads and _is_linear(self._head):
            self._heads[key] = _Twin(self._head, rows)
            made += 1
        return made

    @contextmanager
    def instead(self, mask: SkipMask, rows: torch.Tensor | slice) -> Iterator[None]:
        """Inside, they compute with 8-bit weights; the modules are themselves again on every exit."""
        self.make(mask, rows)
        twins = list(self._twins)
        if (head := self._heads.get((mask.draft_vocab, mask.draft_ids))) is not None:
            twins.append((self._head, head))
        before = [module.__dict__.get("forward") for module, _ in twins]
        try:
            for module, twin in twins:
                module.__dict__["forward"] = twin
            yield
        finally:
            for (module, _), forward in zip(twins, before, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward


class _Twin:
    """Takes a linear module's place: (..., inputs) to (..., outputs)."""

    def __init__(self, module: Any, rows: torch.Tensor | slice = slice(None)) -> None:
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        bias = module.bias
        self._linear = int8_linear(weight[rows], None if bias is None else bias[rows])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _is_linear(module: object) -> bool:
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"  # the same product
