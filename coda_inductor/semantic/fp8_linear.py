# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weight is frozen in FP8, with the gradient that torch lacks.

For x (..., K), W (N, K) in FP8, and its scales t, one for each of the N rows or one in all::

    y = (q @ W^T) * s * t^T + bias,     q, s = quantize(x), by rows or the whole tensor
    dx = (p @ W) * u,                   p, u = quantize(dy * t^T), by rows

t lies along the sum over N, so that it cannot wait until after the product. It multiplies dy before
dy is quantized, which is the same sum: W is never quantized again, and its bits serve both
directions. Hopper multiplies FP8 along K only, so the gradient reads W transposed: one copy of one
layer's bytes in each backward pass, not a second copy of all weights.

Every row has a scale here, also a row of zeros, which torchao's own inference makes NaN: a gradient
has such rows wherever a token has no loss.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coda_inductor.semantic.define import compose
from coda_inductor.semantic.fp8 import quantize, scaled_mm
from coda_inductor.semantic.fp8_casts import TURN

_KIND = torch.float8_e4m3fn, False, False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Any, fast: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.fast, ctx.shape, ctx.dtype = fast, x.shape, x.dtype
        ctx.bias = None if bias is None else bias.dtype
        dims = [1] if scale.numel() == weight.shape[0] else []
        by = scale.t() if dims else scale.reshape(())
        q, inverse = quantize(x.reshape(-1, x.shape[-1]), dims, *_KIND)
        y = scaled_mm(q, weight.t(), inverse, by, x.dtype, fast, False, bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weight, scale = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            q, inverse = quantize(rows.to(torch.float32) * scale.t(), [1], *_KIND)
            by_columns = TURN(weight, rows).t()
            one = torch.ones((), dtype=torch.float32, device=dy.device)
            dx = scaled_mm(q, by_columns, inverse, one, ctx.dtype, ctx.fast, False)
            dx = dx.view(ctx.shape)
        if ctx.needs_input_grad[3]:
            dbias = rows.sum(0).to(ctx.bias)
        return dx, None, None, dbias, None


@compose(name="fp8_linear")
def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """The layer, differentiable once in ``x`` and ``bias``.

    Args:
        x: (..., K), of 16 or 32 bits.
        weight: (N, K) in float8_e4m3fn, row-major, without gradient.
        scale: (N, 1) or (1, 1) float32: ``weight.float() * scale`` is the layer's weight.
        bias: (N,) or None.
        fast: sum along K in the tensor cores' own precision?

    Returns:
        (..., N) in the dtype of x.
    """
    return _Linear.apply(x, weight, scale, bias, fast)
