"""A product of a few rows with 8-bit weights on a GPU. Needs Triton, which comes with torch's packages for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OUTPUTS = 4
"""Of one program: so few that a matrix of a thousand outputs keeps every processor busy."""
_MOST_INPUTS = 1024
"""Read at a time, of each output."""


@torch.library.custom_op("layerskip::int8_product", mutates_args=())  # as one operation to torch.compile
def int8_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """residual + x weight^T scales + bias, computed in float32, in the format of x.

    Shapes: x (T, inputs); weight (outputs, inputs) int8; scales and bias (outputs,); residual (T, outputs). Each of
    them lies row by row, without gaps in a row.
    Cost: one launch. Each row is computed by itself, so its numbers are the same among any others; the weights of
    more than one row come from the cache, as far as they fit.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, num_outputs)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _int8_product[(num_rows, triton.cdiv(num_outputs, _OUTPUTS))](
            x,
            weight,
            scales,
            scales if bias is None else bias,
            x if residual is None else residual,
            out,
            num_outputs,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            has_bias=bias is not None,
            has_residual=residual is not None,
            num_inputs=num_inputs,
            num_together=_OUTPUTS,
            inputs_at_once=min(triton.next_power_of_2(num_inputs), _MOST_INPUTS),
        )
    return out


@int8_product.register_fake
def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, *_others: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@triton.jit  # type: ignore[untyped-decorator]
def _int8_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    num_outputs,
    x_stride,
    residual_stride,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    num_inputs: tl.constexpr,
    num_together: tl.constexpr,
    inputs_at_once: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * num_together + tl.arange(0, num_together)
    is_output = outputs < num_outputs
    begins = outputs.to(tl.int64) * num_inputs
    products = tl.zeros((num_together, inputs_at_once), tl.float32)
    for first in range(0, num_inputs, inputs_at_once):
        inputs = first + tl.arange(0, inputs_at_once)
        is_input = inputs < num_inputs
        numbers = tl.load(x + row * x_stride + inputs, mask=is_input, other=0.0).to(tl.float32)
        rounded = tl.load(
            weight + begins[:, None] + inputs[None, :], mask=is_output[:, None] & is_input[None, :], other=0
        )
        products += rounded.to(tl.float32) * numbers[None, :]
    total = tl.sum(products, axis=1) * tl.load(scales + outputs, mask=is_output, other=0.0)
    if has_bias:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    if has_residual:
        total += tl.load(residual + row * residual_stride + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + outputs, total.to(out.dtype.element_ty), mask=is_output)
