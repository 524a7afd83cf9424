"""Products with 8-bit weights, for drafts: `Int8Linear` on a CPU, `GpuInt8Linear` on a GPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from layerskip.config.skip_mask import DraftBits
from layerskip.huggingface.memory import lack_of_room
from layerskip.huggingface.quantization.weights import GROUP, Int4Weights, Int8Weights

_SMALLEST_SCALE = 6.1e-5
"""Of activations, as the library has it."""


_ROWS_OF_KERNEL = 8
"""Of more rows the kernel's repeated reading costs more than whole weights."""
_AT_ONCE = 1 << 25
"""Weights that are whole at a time."""
BYTES: dict[DraftBits, float] = {8: 1.0, 4: (GROUP / 2 + 2 + 1) / GROUP}
"""Of a weight of so many bits, with its part of a group's scale and zero."""


class GpuInt8Linear:
    """Weights rounded to 8 bits with a scale for every output; activations as they are.

    A few rows, which is how drafts come, are a kernel of ours, see `int8_product`. More of them are multiplied with the
    rounded weights in the format of x, some outputs at a time.
    Cost: a byte for every weight.
    """

    def __init__(self, weight: torch.Tensor | Int8Weights, bias: torch.Tensor | None) -> None:
        """weight: (outputs, inputs), which is rounded, or is so already."""
        from layerskip.huggingface.quantization.gpu_products import int8_product  # where there is Triton alone

        self._kernel = int8_product._opoverload
        with torch.inference_mode(mode=False), torch.no_grad():
            own = weight if isinstance(weight, Int8Weights) else rounded_weights(weight.detach())
        self._weight, self._scales = own.numbers, own.scales
        self.num_outputs, num_inputs = own.numbers.shape
        self._outputs_at_once = max(1, _AT_ONCE // num_inputs)
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


def rounded_weights(weight: torch.Tensor) -> Int8Weights:
    """Of weights (outputs, inputs), some outputs at a time."""
    numbers, scales = [], []
    for part in torch.split(weight, max(1, _AT_ONCE // weight.shape[1])):
        whole = part.float()
        scales.append(whole.abs().amax(dim=1).clamp_min(1e-8) / 127)
        numbers.append((whole / scales[-1][:, None]).round_().to(torch.int8))
    return Int8Weights(torch.cat(numbers), torch.cat(scales))


def rounded_groups(weight: torch.Tensor) -> Int4Weights:
    """Of weights (outputs, inputs), inputs a multiple of `GROUP`, some outputs at a time: as `IntxWeightOnlyConfig` of
    torchao rounds them, scales in bfloat16."""
    found = []
    for part in torch.split(weight, max(1, _AT_ONCE // weight.shape[1])):
        whole = part.float().view(len(part), -1, GROUP)
        low, high = whole.amin(dim=2).clamp_max(0.0), whole.amax(dim=2).clamp_min(0.0)
        scales = ((high - low) / 15).clamp_min(1e-8).bfloat16()
        zeros = (-low / scales.float()).round_().clamp_(0, 15)
        numbers = (whole / scales.float().unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15)
        found.append((numbers.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8)))
    return Int4Weights(*(torch.cat(one) for one in zip(*found, strict=True)))


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


def check_room(weights: Sequence[torch.Tensor], bits: DraftBits = 8) -> None:
    """Raises: ValueError if copies of these in so many bits would take more than half of the free memory."""
    if lack := lack_of_rounded_room(weights, bits):
        raise ValueError(f"skip_mask: int{bits} needs a copy of the weights ({lack})")


def lack_of_rounded_room(weights: Sequence[torch.Tensor], bits: DraftBits) -> str:
    """See `lack_of_room`."""
    size = round(BYTES[bits] * sum(one.numel() for one in weights))
    return lack_of_room(size, weights[0].device) if weights else ""


def _is_reduced() -> bool:
    """Whether activations have 7 bits: without instructions for products of bytes (VNNI) sums of them overflow."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is None or not supported()


_REDUCED = _is_reduced()
