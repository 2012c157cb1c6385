# SPDX-License-Identifier: Apache-2.0
"""The custom op ``coda_inductor::linear_cross_entropy_backward``: the gradients of an LM head's
input, weight and bias, without the gradient of all logits in memory: a slice of the vocabulary at a
time. Each row of dW comes from one slice; dx is summed over the slices in float32, so that it is
not rounded more often than by one GEMM."""

import torch
from torch import Tensor

from coda_inductor.program.reference import accumulate
from coda_inductor.semantic import loss
from coda_inductor.semantic.define import opaque, schema_text
from coda_inductor.semantic.loss import row_weights

#: Slices start at multiples of this, so that rows of dW are aligned and tensor cores are full.
_ALIGN = 128


def linear_cross_entropy_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, number: Tensor,
    weight: Tensor | None, x: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None,
    entropy: Tensor | None, ignore_index: int, label_smoothing: float, reduction: str, cap: float,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of z = ``x @ weight.T + b``: dx (M, K) and dW (V, K), in the dtype of the logits
    (..., V), and db (V,) in the compute dtype.

    ``weight`` (V, K) is for dx, ``x`` (M, K) for dW and ``bias`` for db; without it, that result is
    empty. The logits are z, or with a ``cap`` other than 0 they are ``cap * tanh(z / cap)``, whose
    derivative is ``1 - (logits / cap) ** 2``. ``dlse`` (M,), if any, is a gradient of the rows'
    log-sum-exp, in the compute dtype: its product with the softmax is added. ``dentropy`` (M,), if
    any, is a gradient of the rows' ``entropy`` (M,), both in the compute dtype. The other arguments
    are as in ``semantic.loss.cross_entropy_backward``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    m, v = rows.shape
    scale = row_weights(dloss, target, number, ignore_index, reduction).expand(m).contiguous()
    spread = None if dentropy is None or entropy is None else (dentropy, entropy)
    dw = rows.new_empty((v, x.shape[1]) if x is not None else 0)
    db = lse.new_empty(v if bias else 0)
    total: Tensor | None = None
    width = max(_ALIGN, loss.SLICE_BYTES // max(1, m * rows.element_size()) // _ALIGN * _ALIGN)
    for first in range(0, v, width):
        last = min(v, first + width)
        piece = dlogits(rows, first, last, target, lse, scale, dlse, spread, label_smoothing, cap)
        if x is not None:
            torch.mm(piece.t(), x, out=dw[first : first + width])
        if bias:
            torch.sum(piece, 0, dtype=db.dtype, out=db[first : first + width])
        if weight is not None:
            total = _accumulate(total, piece, weight[first : first + width], lse.dtype)
        del piece  # or the next one would be a second slice in memory
    return rows.new_empty(0) if total is None else total.to(rows.dtype), dw, db


def dlogits(
    rows: Tensor, first: int, last: int, target: Tensor, lse: Tensor, scale: Tensor,
    dlse: Tensor | None, entropy: tuple[Tensor, Tensor] | None, smoothing: float, cap: float,
) -> Tensor:  # fmt: skip
    """Columns ``first`` to ``last`` of the gradient of the uncapped logits, (M, last - first), in
    the dtype of ``rows`` (M, V). ``scale`` (M,) is the factor of each row's gradient; ``entropy``:
    the gradients of the rows' entropies, and these."""
    if rows.is_cuda and lse.dtype == torch.float32:  # the kernel computes in float32
        from coda_inductor.mainloop import dlogits as kernels

        how = (scale, dlse, entropy, smoothing, cap)
        return kernels.dlogits(rows, first, last, target, lse, *how)
    x = rows[:, first:last].to(lse.dtype)
    logs = x - lse[:, None]
    p = torch.exp(logs)
    hit = torch.arange(first, last, device=rows.device) == target[:, None]
    away = hit.to(lse.dtype) * (1.0 - smoothing) + smoothing / rows.shape[1]
    gradient = scale[:, None] * (p - away)
    if dlse is not None:
        gradient = gradient + dlse[:, None] * p
    if entropy is not None:
        slope = torch.where(p > 0, p * (logs + entropy[1][:, None]), 0.0)
        gradient = gradient - entropy[0][:, None] * slope
    if cap:
        gradient = gradient * (1 - (x / cap).square())
    return gradient.to(rows.dtype)


def _accumulate(total: Tensor | None, piece: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """``total + piece @ weight`` in the compute dtype; the products themselves run in 16 bits."""
    if total is None:
        return accumulate(piece, weight, wide)
    if piece.is_cuda and piece.dtype != wide:
        return torch.addmm(total, piece, weight, out_dtype=wide, out=total)
    return total.add_(accumulate(piece, weight, wide))


def _fake(dloss, logits, target, lse, number, weight, x, *how):  # noqa: ARG001 (op's signature)
    m, v = target.shape[0], logits.shape[-1]
    dx = logits.new_empty((m, weight.shape[1]) if weight is not None else 0)
    dw = logits.new_empty((v, x.shape[1]) if x is not None else 0)
    return dx, dw, lse.new_empty(v if how[-1] else 0)


#: The op, as it is in graphs.
BACKWARD = opaque(schema_text(linear_cross_entropy_backward), linear_cross_entropy_backward, _fake)
