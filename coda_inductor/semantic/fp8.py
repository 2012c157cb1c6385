# SPDX-License-Identifier: Apache-2.0
"""FP8 in the semantic vocabulary, as torchao 0.18 defines it in training and in inference: one
quantization, and one product of two quantized tensors. Neither has a gradient: both are created
after AOTAutograd. A linear layer on a weight frozen in FP8 has the gradient that torch lacks."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coda_inductor.compat import scaled_mm as multiply
from coda_inductor.semantic.define import compose, define
from coda_inductor.semantic.fp8_casts import TURN, saturated

#: The least amax, so that a row of zeros has a scale too (torchao's ``float8_utils.EPS``).
EPS = 1e-12


#: The arguments of ``quantize`` that say how, by their names.
KIND = ("dtype", "power_of_two", "divides")


def _quantize_fake(x, dims, dtype, power_of_two, divides):  # noqa: ARG001 (the schema)
    sizes = [1 if i in dims else size for i, size in enumerate(x.shape)] if dims else []
    return torch.empty_like(x, dtype=dtype), x.new_empty(sizes, dtype=torch.float32)


@define(results="q inverse", fake=_quantize_fake, counted_by_rewrite=True)
def quantize(
    x: Tensor, dims: list[int], dtype: torch.dtype, power_of_two: bool, divides: bool
) -> tuple[Tensor, Tensor]:
    """``q = cast(x * scale)`` in FP8 ``dtype``, with shape and layout of x, and ``1 / scale``,
    float32, which undoes it in a product.

    ``scale = max / amax(|x|)`` over ``dims``, which are kept with size 1, or over all elements if
    ``dims`` is empty; then the scale is 0-dim. ``power_of_two``: it is rounded down to a power of
    two. The ops are exactly torchao's (``tensor_to_scale``, ``_ToFloat8ConstrFunc``,
    ``to_fp8_saturated``), so that rows of zeros, NaN and inf give the same results.

    ``divides``, for inference (``_choose_scale_float8``, ``_quantize_affine_float8``):
    ``q = cast(x / scale)`` and the scale itself, ``amax(|x|) / max`` in the dtype of x. If all
    values are zeros, the scale is 0 and they become NaN.
    """
    magnitude = torch.abs(x)
    amax = torch.amax(magnitude, dim=dims, keepdim=True) if dims else torch.max(magnitude)
    q, scale = quantize_by(x.to(torch.float32), amax, dtype, power_of_two, divides)
    return q, scale if divides else scale.reciprocal()


def quantize_by(
    wide: Tensor, amax: Tensor, dtype: torch.dtype, power_of_two: bool, divides: bool
) -> tuple[Tensor, Tensor]:
    """``quantize`` for float32 ``wide`` with maxima ``amax``; and the scale."""
    scale = scale_of(amax, dtype, power_of_two, divides)
    return saturated(wide / scale if divides else wide * scale, dtype), scale


def quantize_by_rows(
    x: Tensor, parts: list[Tensor], dims: list[int], *kind: Any
) -> tuple[Tensor, Tensor]:
    """``quantize(x, dims, *kind)`` with ``divides``, of rows or of all elements, for ``x`` of 16
    bits with the columns of ``parts``: the maxima of each part's rows are computed first."""
    rows = [torch.amax(torch.abs(part), dim=1, keepdim=True) for part in parts]
    amax = functools.reduce(torch.maximum, rows)
    return quantize_by(x.to(torch.float32), amax if dims else torch.amax(amax), *kind)


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_two: bool, divides: bool = False) -> Tensor:
    """The scale for the maximum ``amax``: float32, or with ``divides`` in the dtype of x."""
    limit = torch.finfo(dtype).max
    if divides:
        return (amax / limit).to(torch.float32)
    scale = (limit / torch.clamp(amax.to(torch.float64), min=EPS)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


@define(
    fake=lambda a, b, _inv_a, _inv_b, dtype, *_: a.new_empty(a.shape[0], b.shape[1], dtype=dtype),
    counted_by_rewrite=True,
)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    inv_a: Tensor,
    inv_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool,
    after: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """``(a @ b) * inv_a * inv_b + bias`` in ``out_dtype``; a (M, K) and b (K, N) FP8 in any layout,
    inv_a float32 (M, 1) or 0-dim, inv_b (1, N) or 0-dim: the factors that undo the scales; bias
    (N,), added before the only rounding, or None.

    ``fast``: the tensor cores' own accumulation along all of K. ``after``: ``torch._scaled_mm``
    gets scales of one and rounds, and the true scales multiply its result. The ops are exactly
    torchao's (``preprocess_addmm``, ``addmm_float8_unwrapped``).
    """
    a = a if _row_major(a) else a.contiguous()
    b = b.t().contiguous().t() if _row_major(b) else b
    first, second = inv_a, inv_b
    if after:
        first, second = inv_a.new_ones(()), inv_b.new_ones(())
    elif inv_a.dim() and not inv_b.dim():
        second = inv_b.repeat(b.shape[1]).reshape(1, -1)
    elif inv_b.dim() and not inv_a.dim():
        first = inv_a.repeat(a.shape[0]).reshape(-1, 1)
    product = multiply(a, b, first, second, bias, None, out_dtype, fast)
    return (product * (inv_a * inv_b)).to(out_dtype) if after else product


def _row_major(matrix: Tensor) -> bool:
    return matrix.stride(0) > matrix.stride(1) and matrix.stride(1) == 1


_KIND = torch.float8_e4m3fn, False, False


class _Linear(torch.autograd.Function):
    """For x (..., K), W (N, K) in FP8, and its scales t, one for each of the N rows or one in all::

        y = (q @ W^T) * s * t^T + bias,     q, s = quantize(x), by rows or the whole tensor
        dx = (p @ W) * u,                   p, u = quantize(dy * t^T), by rows

    t lies along the sum over N, so that it cannot wait until after the product. It multiplies dy
    before dy is quantized, which is the same sum: W is never quantized again, and its bits serve
    both directions. Hopper multiplies FP8 along K only, so the gradient reads W transposed: one
    copy of one layer's bytes in each backward pass, not a second copy of all weights.

    Every row has a scale here, also a row of zeros, which torchao's own inference makes NaN: a
    gradient has such rows wherever a token has no loss.
    """

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
