"""Products with 8-bit weights, for drafts: `Int8Linear` on a CPU, `GpuInt8Linear` on a GPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from layerskip.config.skip_mask import SkipMask
from layerskip.huggingface.memory import lack_of_room

_SMALLEST_SCALE = 6.1e-5
"""Of activations, as the library has it."""


_ROWS_OF_KERNEL = 8
"""Of more rows the kernel's repeated reading costs more than whole weights."""
_AT_ONCE = 1 << 25
"""Weights that are whole at a time."""


class GpuInt8Linear:
    """Weights rounded to 8 bits with a scale for every output; activations as they are.

    A few rows, which is how drafts come, are a kernel of ours, see `int8_product`. More of them are multiplied with the
    rounded weights in the format of x, some outputs at a time.
    Cost: a byte for every weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: (outputs, inputs)."""
        from layerskip.huggingface.gpu_products import int8_product  # where there is Triton alone

        self._kernel = int8_product._opoverload
        self.num_outputs = weight.shape[0]
        self._outputs_at_once = max(1, _AT_ONCE // weight.shape[1])
        with torch.inference_mode(mode=False), torch.no_grad():
            parts = [rounded_weights(one) for one in torch.split(weight.detach(), self._outputs_at_once)]
            self._weight, self._scales = torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, None)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, residual)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= _ROWS_OF_KERNEL:
            few: torch.Tensor = self._kernel(x, self._weight, self._scales, self._bias, residual)
            return few
        size = self._outputs_at_once
        parts = zip(torch.split(self._weight, size), torch.split(self._scales, size), strict=True)
        out = torch.cat([(x @ weight.to(x.dtype).t()).float().mul_(scales) for weight, scales in parts], dim=1)
        for one in (self._bias, residual):
            out = out if one is None else out.add_(one)
        return out.to(x.dtype)


def rounded_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of weights (outputs, inputs) those in int8, and (outputs,) scales in float32."""
    whole = weight.float()
    scales = whole.abs().amax(dim=1).clamp_min(1e-8) / 127
    return (whole / scales[:, None]).round_().to(torch.int8), scales


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear | GpuInt8Linear:
    """The one for this device; weight: (outputs, inputs)."""
    return Int8Linear(weight, bias) if weight.device.type == "cpu" else GpuInt8Linear(weight, bias)


@functools.cache
def int8_refusal(device: torch.device) -> str | None:
    """What products with 8-bit weights need that this device lacks; None where it has all.

    Cost: on a GPU some seconds, once: a kernel is compiled and tried.
    """
    if device.type == "cpu":
        has_all = torch.backends.quantized.engine != "none" and hasattr(torch.ops.quantized, "linear_dynamic")
        return None if has_all else "torch's dynamically quantized products, which this build lacks"
    if device.type != "cuda":
        return f"a CPU or a CUDA device, got {device}"
    try:
        one = torch.eye(32, device=device)
        is_right = torch.allclose(GpuInt8Linear(one, one[0])(one[:2]), one[:2] + one[0], rtol=1e-3)
    except Exception as error:  # noqa: BLE001 (a compiler may fail in any way it likes)
        reason = (str(error).strip().splitlines() or ["?"])[0]
        return f"Triton and its compiler, got {type(error).__name__}: {reason}"
    return None if is_right else "Triton's products, which are wrong on this device"


class Int8Linear:
    """Weights rounded to 8 bits with a scale for every output; activations likewise, as they come, with a scale for
    every row. Sums are exact, so a row's result depends on nothing but the row.

    A row at a time, which is how drafts come, is one call of torch's operator. Several rows are computed in floating
    point from the same rounded numbers.
    Cost: a byte for every weight, and some seconds for each hundred million of them. The operator is one of those that
    torch 2.13 calls deprecated, for torchao's, which have no such kernel without a compiler.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: (outputs, inputs)."""
        self.num_outputs = weight.shape[0]
        with torch.inference_mode(mode=False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = weight.detach().float()
            scales = whole.abs().amax(dim=1).clamp_min(1e-8).double() / 127
            zeros = torch.zeros(len(scales), dtype=torch.long)
            rounded = torch.quantize_per_channel(whole, scales, zeros, 0, torch.qint8)
            self._packed: Any = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.float())
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            out: torch.Tensor = torch.ops.quantized.linear_dynamic(x.float(), self._packed, _REDUCED)
            return out.to(x.dtype)
        weight = torch.ops.quantized.linear_unpack(self._packed)[0].dequantize()
        rows = rounded_rows(x.float())
        return (rows @ weight.t() if self._bias is None else torch.addmm(self._bias, rows, weight.t())).to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """What the operator makes of float32 rows (T, inputs), each by itself: multiples of a scale, of which there are 256
    around a zero that is one of them (128 where the processor's products would overflow otherwise)."""
    most = 127 if _REDUCED else 255
    low, high = x.amin(dim=1, keepdim=True).clamp_max(0.0), x.amax(dim=1, keepdim=True).clamp_min(0.0)
    scale = (high.double() - low.double()) / most
    scale = torch.where(scale == 0.0, 0.1, scale).clamp_min(_SMALLEST_SCALE)
    by_low, by_high = -low / scale, most - high / scale
    zero = torch.where((low / scale).abs() < most - (high / scale).abs(), by_low, by_high).round().clamp(0, most)
    scale, zero = scale.float(), zero.float()
    return ((x * (1.0 / scale)).round() + zero).clamp(0, most).sub_(zero).mul_(scale)


class Int8Modules:
    """A model's linear modules in its decoder layers, and its output embedding, with 8-bit weights for a while.

    Cost: see `Int8Linear` and `GpuInt8Linear`; made at the first draft. What is no linear module, as a mixture's
    experts in one tensor, stays as it is.
    """

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module) -> None:
        self._layers, self._head = layers, head
        self._twins: list[tuple[nn.Module, _Twin]] = []
        self._heads: dict[int | None, _Twin] = {}

    def make(self, mask: SkipMask) -> int:
        """Of what drafts under this mask need, what is not there yet; returns how many it made."""
        made = 0
        if not self._twins:
            modules: list[Any] = [one for layer in self._layers for one in layer.modules() if _is_linear(one)]
            check_room([one.weight for one in modules])
            self._twins = [(one, _Twin(one)) for one in modules]
            made += 1
        if mask.draft_vocab not in self._heads and _is_linear(self._head):
            self._heads[mask.draft_vocab] = _Twin(self._head, mask.draft_vocab)
            made += 1
        return made

    @contextmanager
    def instead(self, mask: SkipMask) -> Iterator[None]:
        """Inside, they compute with 8-bit weights; the modules are themselves again on every exit."""
        self.make(mask)
        twins = list(self._twins)
        if (head := self._heads.get(mask.draft_vocab)) is not None:
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

    def __init__(self, module: Any, num_outputs: int | None = None) -> None:
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        bias = module.bias
        self._linear = int8_linear(weight[:num_outputs], None if bias is None else bias[:num_outputs])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _is_linear(module: object) -> bool:
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"  # the same product


def check_room(weights: Sequence[torch.Tensor]) -> None:
    """Raises: ValueError if copies of these in 8 bits would take more than half of the free memory."""
    if lack := lack_of_int8_room(weights):
        raise ValueError(f"skip_mask: int8 needs a copy of the weights ({lack})")


def lack_of_int8_room(weights: Sequence[torch.Tensor]) -> str:
    """See `lack_of_room`."""
    return lack_of_room(sum(one.numel() for one in weights), weights[0].device) if weights else ""


def _is_reduced() -> bool:
    """Whether activations have 7 bits: without instructions for products of bytes (VNNI) sums of them overflow."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is None or not supported()


_REDUCED = _is_reduced()
