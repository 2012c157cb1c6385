# SPDX-License-Identifier: Apache-2.0
"""Norms of rows in the semantic vocabulary, each with the record that its deferral asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import OpOverload
from coda_inductor.semantic.define import define, statistics_dtype


@dataclass(frozen=True)
class Norm:
    """What ``rewrite.norm`` asks of ``y = (x - shift) * scale * weight + bias``, a norm of rows.

    Attributes:
        name: what it counts as when it is deferred.
        rows: plain torch, of a row in the statistics' dtype, of the dtype in which GEMMs read it
            and of the op's numbers. Returns what ``slope`` reads, the scale first, and the shifts:
            all (..., 1), by sums over the row, which an epilogue makes.
        numbers: the op's parameters that are numbers.
        mean: which of the op's results is the mean of x, for a norm that has a shift.
        backward: the op of its gradients; None where it is only deferred in inference.
        slope: plain torch, of rowsum(dy * y), x, what ``rows`` returned first, and the numbers:
            what x is multiplied with in dx = scale * dy * weight + slope * x.
    """

    name: str
    rows: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    numbers: tuple[str, ...] = ("eps",)
    mean: int | None = None
    backward: OpOverload | None = None
    slope: Callable[..., Tensor] | None = None


#: Every norm, by its op.
NORMS: dict[OpOverload, Norm] = {}


def mean_square(x: Tensor) -> Tensor:
    """Of each row, (..., 1)."""
    return (x * x).mean(-1, keepdim=True)


def sum_square(x: Tensor) -> Tensor:
    """Of each row, (..., 1)."""
    return (x * x).sum(-1, keepdim=True)


def rms_norm_definition(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension.

    ``y = x * rstd * weight`` with ``rstd = rsqrt(mean(x**2, -1) + eps)``, all in float32 (float64
    for float64 inputs), then cast to ``out_dtype``. Returns y, shaped like x, and rstd (..., 1).
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467), eq. 4.
    """
    wide = x.to(statistics_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(out_dtype), rstd


def rms_norm_backward_definition(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm: dx, shaped and typed like x, and dweight, like weight.

    With ``n = x * rstd`` and ``p = dy * weight``: ``dx = rstd * (p - n * mean(p * n, -1))`` and
    ``dweight = sum(dy * n)`` over all rows (the derivative of ``rms_norm_definition``). ``needs``
    says which of the two are wanted; the other comes back as an empty tensor.
    """
    normalized = x.to(rstd.dtype) * rstd
    wide = dy.to(rstd.dtype)
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if needs[0]:
        p = wide if weight is None else wide * weight.to(rstd.dtype)
        dx = (rstd * (p - normalized * (p * normalized).mean(-1, keepdim=True))).to(x.dtype)
    if needs[1] and weight is not None:
        rows = list(range(x.dim() - 1))
        product = wide * normalized
        dweight = (product.sum(rows) if rows else product).to(weight.dtype)
    return dx, dweight


def layer_norm_definition(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension.

    ``y = (x - mean) * rstd * weight + bias`` with ``rstd = rsqrt(var + eps)``, var being the
    biased variance, all in float32 (float64 for float64 inputs), then cast to ``out_dtype``.
    Returns y, shaped like x, and mean and rstd, each (..., 1). Source: Ba, Kiros and Hinton,
    "Layer Normalization" (arXiv 1607.06450), eq. 4.
    """
    wide = x.to(statistics_dtype(x.dtype))
    var, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(out_dtype), mean, rstd


def layer_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of LayerNorm: dx, dweight and dbias, each shaped and typed like its input.

    With ``n = (x - mean) * rstd`` and ``p = dy * weight``:
    ``dx = rstd * (p - mean(p, -1) - n * mean(p * n, -1))``, ``dweight = sum(dy * n)`` and
    ``dbias = sum(dy)`` over all rows (the derivative of ``layer_norm_definition``).
    """
    normalized = (x.to(rstd.dtype) - mean) * rstd
    wide = dy.to(rstd.dtype)
    p = wide if weight is None else wide * weight.to(rstd.dtype)
    dot = (p * normalized).mean(-1, keepdim=True)
    dx = (rstd * (p - p.mean(-1, keepdim=True) - normalized * dot)).to(x.dtype)

    def total(rows: Tensor, like: Tensor | None) -> Tensor | None:
        dims = list(range(x.dim() - 1))
        rows = rows.sum(dims) if dims else rows
        return None if like is None else rows.to(like.dtype)

    return dx, total(wide * normalized, weight), total(wide, bias)


rms_norm_backward = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, bool[] needs) "
    "-> (Tensor, Tensor)",
    rms_norm_backward_definition,
    counted_by_rewrite=True,
)
rms_norm = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType out_dtype) "
    "-> (Tensor y, Tensor rstd)",
    rms_norm_definition,
    gradient=rms_norm_backward,
    of=("x", "weight"),
    counted_by_rewrite=True,
)

layer_norm = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype) "
    "-> (Tensor y, Tensor mean, Tensor rstd)",
    layer_norm_definition,
    gradient=layer_norm_gradient,
    of=("x", "weight", "bias"),
    counted_by_rewrite=True,
)


def _rms_rows(x: Tensor, _dtype: torch.dtype, eps: float) -> Any:
    return (torch.rsqrt(mean_square(x) + eps),), ()


def _rms_slope(dot: Tensor, x: Tensor, rstd: Tensor, _eps: float) -> Tensor:
    return rstd * rstd * dot * (-1.0 / x.shape[-1])


def _layer_rows(x: Tensor, dtype: torch.dtype, eps: float) -> Any:
    """Of a row whose mean is small: its variance by its second moment, for the partial sums of one
    pass make both.

    The variance is at least what rounding the row to ``dtype`` at its mean would add to it, a
    twelfth of the square of the spacing there: eager's has that. Less is what is left of float32
    sums that cancel, and may be nothing or negative.
    """
    mean = x.mean(-1, keepdim=True)
    moment = mean_square(x)
    square = mean * mean
    variance = torch.maximum(moment - square, square * (torch.finfo(dtype).eps ** 2 / 12))
    return (torch.rsqrt(variance + eps),), (mean,)


NORMS[rms_norm] = Norm("rms_norm", _rms_rows, backward=rms_norm_backward, slope=_rms_slope)
NORMS[layer_norm] = Norm("layer_norm", _layer_rows, mean=1)


def define_norm(
    op_name: str,
    name: str,
    square: Callable[[Tensor], Tensor],
    scale: Callable[..., Tensor],
    numbers: Sequence[str],
) -> OpOverload:
    """The op ``y = x * scale(square(x), *numbers) * weight`` and its record, whose gradient follows
    from the derivative of ``scale``. ``square`` is :func:`mean_square` or :func:`sum_square`.

    The op returns y, the scale and the square; dx = scale * dy * weight + slope * x, with
    slope = 2 scale' rowsum(dy * weight * x), for a sum's derivative by x is 2 x.
    """

    def rows(x: Tensor, _dtype: torch.dtype, *values: float) -> Any:
        found = square(x)
        return (scale(found, *values), found), ()

    def slope(dot: Tensor, x: Tensor, factor: Tensor, found: Tensor, *values: float) -> Tensor:
        count = x.shape[-1] if square is mean_square else 1
        pull = torch.func.vjp(lambda s: scale(s, *values), found)[1]
        (derivative,) = pull(torch.ones_like(found))
        return dot / factor * derivative * (2.0 / count)

    def forward(x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        *values, out_dtype = others
        wide = x.to(statistics_dtype(x.dtype))
        statistics, _ = rows(wide, out_dtype, *values)
        y = wide * statistics[0]
        return (y if weight is None else y * weight.to(y.dtype)).to(out_dtype), *statistics

    def backward(
        dy: Tensor, x: Tensor, weight: Tensor | None, factor: Tensor, found: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor]:
        *values, needs = others
        wide, scaled = x.to(factor.dtype), dy.to(factor.dtype) * factor
        dx, dweight = x.new_empty(0), x.new_empty(0)
        if needs[0]:
            p = scaled if weight is None else scaled * weight.to(factor.dtype)
            dot = (p * wide).sum(-1, keepdim=True)
            dx = (p + wide * slope(dot, wide, factor, found, *values)).to(x.dtype)
        if needs[1] and weight is not None:
            dweight = (scaled * wide).flatten(0, -2).sum(0).to(weight.dtype)
        return dx, dweight

    floats = "".join(f"float {n}, " for n in numbers)
    gradient = define(
        f"{op_name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor scale, Tensor square, "
        f"{floats}bool[] needs) -> (Tensor, Tensor)",
        backward,
        name=f"{name}_backward",
        counted_by_rewrite=True,
    )
    op = define(
        f"{op_name}(Tensor x, Tensor? weight, {floats}ScalarType out_dtype) "
        "-> (Tensor y, Tensor scale, Tensor square)",
        forward,
        gradient=gradient,
        of=("x", "weight"),
        name=name,
        counted_by_rewrite=True,
    )
    NORMS[op] = Norm(name, rows, tuple(numbers), backward=gradient, slope=slope)
    return op
