# SPDX-License-Identifier: Apache-2.0
"""Norms of rows in the semantic vocabulary, each with the record that its deferral reads.

All compute in float32 (float64 for float64 inputs), then cast to ``out_dtype``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import OpOverload
from coda_inductor.semantic.define import define, statistics_dtype


@dataclass(frozen=True)
class Norm:
    """The properties of a norm ``y = x * scale * weight`` for ``rewrite.norm``.

    Attributes:
        name: the name of its counter when it is deferred.
        rows: plain torch, of x in float32 and the op's numbers. Returns the scale and the bend, if
            any (:func:`_gradients`), each (..., 1), from sums over rows, which epilogues compute.
        numbers: the op's parameters that are numbers.
        backward: the op of its gradients.
    """

    name: str
    rows: Callable[..., tuple[Tensor, ...]]
    numbers: tuple[str, ...]
    backward: OpOverload


#: Every norm, by its op.
NORMS: dict[OpOverload, Norm] = {}


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, scale: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """The gradients dx and dweight of a norm, each shaped like its input and in its dtype.
    ``others``: the bend, if any, and ``needs``.

    With ``n = x * scale`` and ``p = dy * weight``: ``dx = scale * (p - n * mean(p * n) * bend)``
    and ``dweight = sum(dy * n)`` over all rows. Gradients that ``needs`` excludes are empty.
    """
    *bends, needs = others
    wide = dy.to(scale.dtype)
    normalized = x.to(scale.dtype) * scale
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if needs[0]:
        p = wide if weight is None else wide * weight.to(scale.dtype)
        dot = functools.reduce(torch.mul, bends, (p * normalized).mean(-1, keepdim=True))
        dx = (scale * (p - normalized * dot)).to(x.dtype)
    if weight is not None and needs[1]:
        rows, dims = wide * normalized, list(range(x.dim() - 1))
        dweight = (rows.sum(dims) if dims else rows).to(weight.dtype)
    return dx, dweight


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

    def rows(x: Tensor, *values: float) -> tuple[Tensor, ...]:
        square = fold(x.pow(2), -1, keepdim=True)
        result = scale(square, *values)
        if not bent:
            return (result,)
        slope = torch.func.grad(lambda square: scale(square, *values).sum())
        slope = torch.func.functionalize(slope)  # of clamp torch has one that writes in place
        factor = -2.0 * (x.shape[-1] if of_sum else 1)
        return result, slope(square) / result / result / result * factor

    def forward(x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        *values, out_dtype = others
        wide = x.to(statistics_dtype(x.dtype))
        statistics = rows(wide, *values)
        y = wide * statistics[0]
        y = y if weight is None else y * weight.to(y.dtype)
        return y.to(out_dtype), *statistics

    def fake(x: Tensor, _weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        row = x[..., :1].to(statistics_dtype(x.dtype))
        return torch.empty_like(x, dtype=others[-1]), *(torch.empty_like(row) for _ in range(2))

    op_name, bend = op_name or name, ", Tensor bend" * bent

    gradient = define(
        f"{op_name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor scale{bend}, "
        "bool[] needs) -> (Tensor, Tensor)",
        name=f"{name}_backward", counted_by_rewrite=True,
    )(_gradients)  # fmt: skip
    op = define(
        f"{op_name}(Tensor x, Tensor? weight, {''.join(f'float {n}, ' for n in numbers)}"
        f"ScalarType out_dtype) -> (Tensor y, Tensor scale{bend})",
        fake=fake if bent else None, gradient=gradient, wrt=("x", "weight"), name=name,
        counted_by_rewrite=True,
    )(forward)  # fmt: skip
    NORMS[op] = Norm(name, rows, tuple(numbers), gradient)
    return op


#: Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467), eq. 4.
rms_norm = define_norm(
    "rms_norm", lambda square, eps: torch.rsqrt(square + eps), ("eps",), bent=False
)
