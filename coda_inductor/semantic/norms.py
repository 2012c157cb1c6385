# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm in the semantic vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.semantic.define import define, statistics_dtype


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
    tells which of the two are needed; the other is returned as an empty tensor.
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
