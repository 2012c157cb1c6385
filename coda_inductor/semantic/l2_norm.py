# SPDX-License-Identifier: Apache-2.0
"""Rows over their length, which is bounded from below, in the semantic vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.semantic.define import define, statistics_dtype


def l2_norm_definition(
    x: Tensor, weight: Tensor | None, scale: float, floor: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = x * rstd * weight`` with ``rstd = scale / max(||x||, floor)``, the length being that of
    the last dimension, all in float32 (float64 for float64 inputs), then cast to ``out_dtype``.

    Returns y, shaped like x; rstd (..., 1); and what the gradient needs, ``radial`` (..., 1):
    ``1 / ||x||**2``, or 0 where the length is below the floor.
    """
    wide = x.to(statistics_dtype(x.dtype))
    length = wide.pow(2).sum(-1, keepdim=True).sqrt()
    inverse = length.clamp_min(floor).reciprocal()
    rstd = inverse * scale
    y = wide * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(out_dtype), rstd, torch.where(length >= floor, inverse * inverse, 0.0)


def l2_norm_backward_definition(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, radial: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of the l2 norm: dx, shaped and typed like x, and dweight, like weight.

    With ``n = x * rstd`` and ``p = dy * weight``: ``dx = rstd * p - x * radial * sum(p * n, -1)``,
    for a length that is bounded does not change, and ``dweight = sum(dy * n)`` over all rows.
    ``needs`` says which of the two are wanted; the other comes back as an empty tensor.
    """
    wide, grad = x.to(rstd.dtype), dy.to(rstd.dtype)
    normalized = wide * rstd
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if needs[0]:
        p = grad if weight is None else grad * weight.to(rstd.dtype)
        dx = (rstd * p - wide * (radial * (p * normalized).sum(-1, keepdim=True))).to(x.dtype)
    if needs[1] and weight is not None:
        rows = list(range(x.dim() - 1))
        product = grad * normalized
        dweight = (product.sum(rows) if rows else product).to(weight.dtype)
    return dx, dweight


l2_norm_backward = define(
    "l2_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor radial, "
    "bool[] needs) -> (Tensor, Tensor)",
    l2_norm_backward_definition,
    counted_by_rewrite=True,
)
l2_norm = define(
    "l2_norm(Tensor x, Tensor? weight, float scale, float floor, ScalarType out_dtype) "
    "-> (Tensor y, Tensor rstd, Tensor radial)",
    l2_norm_definition,
    gradient=l2_norm_backward,
    of=("x", "weight"),
    counted_by_rewrite=True,
)
