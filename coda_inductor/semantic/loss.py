# SPDX-License-Identifier: Apache-2.0
"""The loss's part of the semantic vocabulary: logsumexp and entropy of rows, cross entropy.

``cross_entropy`` takes the logits in the dtype of the model's last GEMM. Losses are usually written
with a cast, a float32 copy of the largest tensor of a step; here only values per row are float32.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coda_inductor.program.reference import entropy as entropy_of
from coda_inductor.program.reference import logsumexp
from coda_inductor.semantic.define import define, statistics_dtype

#: Bytes of one slice of the logits' gradient: 8192 rows of 16 thousand columns in 16 bits. As many
#: are in memory at a time where it is sliced (``runtime.linear_cross_entropy``).
SLICE_BYTES = 2**28


@define()
def row_logsumexp(x: Tensor) -> Tensor:
    """``log(sum(exp(x), -1))`` in float32 (float64 for float64): x (..., V) -> (...)."""
    return logsumexp(x.to(statistics_dtype(x.dtype)), -1)


@define()
def row_entropy(x: Tensor, lse: Tensor) -> Tensor:
    """The entropy in nats, in the dtype of ``lse``, of the softmax of each row: x (..., V) and its
    ``row_logsumexp`` (...) -> (...)."""
    return entropy_of(x.to(lse.dtype), lse)


def row_weights(
    dloss: Tensor, target: Tensor, number: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """The factor of each row's gradient, (M,); 0 if the row is ignored."""
    weight = dloss.to(number.dtype)
    if reduction == "mean":
        weight = weight / number
    return torch.where(target != ignore_index, weight, 0.0)


@define()
def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    number: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """The gradient of the logits, with their shape and dtype. For a row with the softmax p it is
    ``p - (1 - s) onehot(target) - s / V`` times the row's weight."""
    rows = logits.reshape(-1, logits.shape[-1])
    v = rows.shape[1]
    weight = row_weights(dloss, target, number, ignore_index, reduction)
    p = torch.exp(rows.to(lse.dtype) - lse[:, None])
    hit = torch.arange(v, device=rows.device) == target[:, None]
    away = hit.to(lse.dtype) * (1.0 - label_smoothing)
    if label_smoothing:
        away = away + label_smoothing / v
    return (weight[:, None] * (p - away)).to(logits.dtype).reshape(logits.shape)


def _gathered(rows: Tensor, index: Tensor, _dtype: torch.dtype) -> Tensor:
    return rows.gather(1, index[:, None])[:, 0]


def _compared(rows: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """By numbers of columns in ``dtype``, of which a tile reads one a column and one a row. As a
    number is looked up, an index out of range is an error here too."""
    columns = torch.arange(rows.shape[1], dtype=dtype, device=rows.device)
    away = (columns - columns.gather(0, index)[:, None]).abs()
    return torch.where(away < 0.5, rows.to(dtype), 0.0).sum(1)


def cross_entropy_definition(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    out_dtype: torch.dtype,
    *,
    pick: Callable[..., Tensor] = _gathered,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of ``logits`` (..., V), M rows in all, with class indices ``target`` (M,).

    A row's loss is ``lse - logits[target]``, with smoothing s ``lse - (1 - s) logits[target] - s
    mean(logits)``, and 0 where the target is ``ignore_index``. Returns the loss in ``out_dtype``:
    (M,) for reduction "none", else () for "sum" and "mean" (over rows that are not ignored, NaN if
    there are none); then lse (M,) and the number of rows that count, (), both in the compute dtype.
    A row with +inf has no softmax: as in torch its loss and gradient, hence also its lse, are NaN.
    Source: the definition of ``torch.nn.CrossEntropyLoss``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    lse = row_logsumexp(rows)
    lse = torch.where(lse == math.inf, math.nan, lse)
    counts = target != ignore_index
    index = torch.where(counts, target, 0)
    picked = pick(rows, index, lse.dtype).to(lse.dtype)
    if label_smoothing:
        mean = rows.to(lse.dtype).mean(-1)
        picked = (1 - label_smoothing) * picked + label_smoothing * mean
    loss = torch.where(counts, lse - picked, 0.0)
    number = counts.to(lse.dtype).sum()
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / number
    return loss.to(out_dtype), lse, number


cross_entropy = define(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing, "
    "str reduction, ScalarType out_dtype) -> (Tensor loss, Tensor lse, Tensor number)",
    gradient=cross_entropy_backward,
    wrt=("logits",),
)(cross_entropy_definition)


def compared_cross_entropy(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`cross_entropy_definition`, by reading all logits, which need not be in memory."""
    return cross_entropy_definition(*args, pick=_compared)


@define()
def entropy_backward(dy: Tensor, logits: Tensor, lse: Tensor, wide: Tensor) -> Tensor:
    """The gradient of the logits, with their shape and dtype: for a row with the softmax p and the
    entropy H it is ``-p (log p + H)`` times ``dy``."""
    logs = logits.to(lse.dtype) - lse[..., None]
    p = torch.exp(logs)
    slope = torch.where(p > 0, p * (logs + wide[..., None]), 0.0)
    return (-dy.to(lse.dtype)[..., None] * slope).to(logits.dtype)


@define(results="entropy lse wide", gradient=entropy_backward, wrt=("logits",))
def entropy(logits: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The entropy, in nats, of the softmax of ``logits`` (..., V): (...) in ``out_dtype``; then the
    rows' log-sum-exps and entropies in the compute dtype."""
    lse = row_logsumexp(logits)
    wide = row_entropy(logits, lse)
    return wide.to(out_dtype), lse, wide
