# SPDX-License-Identifier: Apache-2.0
"""Norms of rows in the semantic vocabulary, each with the record that its deferral reads.

All compute in float32 (float64 for float64 inputs), then cast to ``out_dtype``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import OpOverload
from coda_inductor.semantic.define import define, statistics_dtype


@dataclass(frozen=True)
class Norm:
    """The properties of a norm ``y = (x - shift) * scale * weight + bias`` for ``rewrite.norm``.

    Attributes:
        name: the name of its counter when it is deferred.
        rows: plain torch, of x in float32, the dtype in which GEMMs read it, and the op's numbers.
            Returns two tuples of (..., 1), from sums over rows, which an epilogue computes: the
            scale and the bend, if any (:func:`_gradients`); the shift, if any.
        numbers: the op's parameters that are numbers.
        mean: the index of the op's result that is the mean of x, for a norm with a shift.
        backward: the op of its gradients; None for a norm that is deferred only in inference.
    """

    name: str
    rows: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    numbers: tuple[str, ...]
    mean: int | None = None
    backward: OpOverload | None = None


#: Every norm, by its op.
NORMS: dict[OpOverload, Norm] = {}


def _weighted(
    y: Tensor, weight: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(out_dtype)


def _gradients(
    dy: Tensor,
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    means: Sequence[Tensor],
    statistics: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a norm, each shaped like its input and in its dtype. ``vectors`` are
    weight and bias, ``means`` the mean of x, with a shift; ``statistics`` the scale and the bend.

    With ``n = (x - mean) * scale`` and ``p = dy * weight``: ``dx = scale * (p - mean(p) - n *
    mean(p * n) * bend)``, mean(p) only where there is a shift; ``dweight = sum(dy * n)`` and
    ``dbias = sum(dy)`` over all rows. Gradients that ``needs`` excludes are empty tensors.
    """
    scale, *bends = statistics
    wide = dy.to(scale.dtype)
    normalized = functools.reduce(torch.sub, means, x.to(scale.dtype)) * scale
    dx, *totals = (x.new_empty(0) for _ in range(3))
    if needs[0]:
        p = wide if vectors[0] is None else wide * vectors[0].to(scale.dtype)
        dot = functools.reduce(torch.mul, bends, (p * normalized).mean(-1, keepdim=True))
        dp = p - p.mean(-1, keepdim=True) if means else p
        dx = (scale * (dp - normalized * dot)).to(x.dtype)
    for i, (vector, need) in enumerate(zip(vectors, needs[1:], strict=True)):
        if vector is not None and need:
            rows, dims = (wide * normalized, wide)[i], list(range(x.dim() - 1))
            totals[i] = (rows.sum(dims) if dims else rows).to(vector.dtype)
    return dx, totals[0], totals[1]


def define_norm(
    name: str,
    scale: Callable[..., Tensor],
    numbers: Sequence[str],
    *,
    op_name: str = "",
    of_sum: bool = False,
    bent: bool = True,
) -> OpOverload:
    """The op ``y = x * scale * weight`` over the last dimension, its gradient and its record.

    ``scale`` is an elementwise, positive function of the mean of each row's squares (``of_sum``: of
    their sum) and of ``numbers``. The op returns y, the scale and, if it is ``bent``, the bend ``-2
    * scale' / scale**3`` (times d for a sum): the mean square's own derivative is 2 x / d.
    """
    fold = torch.sum if of_sum else torch.mean

    def rows(x: Tensor, _dtype: torch.dtype, *values: float) -> Any:
        square = fold(x.pow(2), -1, keepdim=True)
        result = scale(square, *values)
        if not bent:
            return (result,), ()
        slope = torch.func.grad(lambda square: scale(square, *values).sum())
        slope = torch.func.functionalize(slope)  # of clamp torch has one that writes in place
        factor = -2.0 * (x.shape[-1] if of_sum else 1)
        return (result, slope(square) / result / result / result * factor), ()

    def forward(x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        *values, out_dtype = others
        wide = x.to(statistics_dtype(x.dtype))
        statistics, _ = rows(wide, out_dtype, *values)
        return _weighted(wide * statistics[0], weight, None, out_dtype), *statistics

    def fake(x: Tensor, _weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        row = x[..., :1].to(statistics_dtype(x.dtype))
        return torch.empty_like(x, dtype=others[-1]), *(torch.empty_like(row) for _ in range(2))

    op_name, bend = op_name or name, ", Tensor bend" * bent

    @define(
        f"{op_name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor scale{bend}, "
        "bool[] needs) -> (Tensor, Tensor)",
        name=f"{name}_backward", counted_by_rewrite=True,
    )  # fmt: skip
    def gradient(dy: Tensor, x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        *statistics, needs = others
        return _gradients(dy, x, (weight, None), (), statistics, (*needs, False))[:2]

    op = define(
        f"{op_name}(Tensor x, Tensor? weight, {''.join(f'float {n}, ' for n in numbers)}"
        f"ScalarType out_dtype) -> (Tensor y, Tensor scale{bend})",
        fake=fake if bent else None, gradient=gradient, wrt=("x", "weight"), name=name,
        counted_by_rewrite=True,
    )(forward)  # fmt: skip
    NORMS[op] = Norm(name, rows, tuple(numbers), backward=gradient)
    return op


#: Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467), eq. 4.
rms_norm = define_norm(
    "rms_norm", lambda square, eps: torch.rsqrt(square + eps), ("eps",), bent=False
)

_ROOT_MEAN_SQUARE = NORMS[rms_norm]


@define(results="y scale", name="rms_norm", counted_by_rewrite=True)
def biased_rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm with a bias, which only vectors of a time step make (``rewrite.norm.modulated``)."""
    wide = x.to(statistics_dtype(x.dtype))
    ((scale,), _) = _ROOT_MEAN_SQUARE.rows(wide, out_dtype, eps)
    return _weighted(wide * scale, weight, bias, out_dtype), scale


NORMS[biased_rms_norm] = replace(_ROOT_MEAN_SQUARE, backward=None)


def layer_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of LayerNorm: dx, dweight and dbias, each shaped like its input."""
    return _gradients(dy, x, (weight, bias), (mean,), (rstd,), (True,) * 3)


@define(
    results="y mean rstd", gradient=layer_norm_gradient, wrt=("x", "weight", "bias"),
    counted_by_rewrite=True,
)  # fmt: skip
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension: y, shaped like x, and mean and rstd, each (..., 1). y lies
    row by row, as torch's does.

    ``y = (x - mean) * rstd * weight + bias`` with ``rstd = rsqrt(var + eps)``, var being the
    biased variance. Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv 1607.06450), eq. 4.
    """
    wide = x.to(statistics_dtype(x.dtype))
    var, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    return _weighted((wide - mean) * rstd, weight, bias, out_dtype).contiguous(), mean, rstd


def _layer_rows(x: Tensor, dtype: torch.dtype, eps: float) -> Any:
    """The statistics of rows with a small mean. The variance comes from the second moment, because
    the partial sums of one pass give both.

    The variance is clamped from below to the variance of rounding a row to ``dtype``, which eager's
    variance includes: a twelfth of the square of the spacing at the mean. Smaller values, zero and
    negative ones included, are noise of float32 sums that cancel.
    """
    mean, moment = x.mean(-1, keepdim=True), x.pow(2).mean(-1, keepdim=True)
    square = mean * mean
    variance = torch.maximum(moment - square, square * (torch.finfo(dtype).eps ** 2 / 12))
    return (torch.rsqrt(variance + eps),), (mean,)


NORMS[layer_norm] = Norm("layer_norm", _layer_rows, ("eps",), mean=1)
