# SPDX-License-Identifier: Apache-2.0
"""What comes behind a GEMM that reads a norm which was put off: its row scale, and for LayerNorm a
rank-one term and a constant row.

Before::

    z = n @ W + b

After (RMSNorm, rule R1; LayerNorm, rule R5)::

    z = (h @ W) * rstd + b
    z = (h @ W - m * colsum) * rstd + (offset + b)

Why it is valid: n = D_rstd h for RMSNorm, and D_rstd (h - m gamma^T) + 1 beta^T for LayerNorm,
with h = x * gamma, m the mean of a row of x, colsum = gamma^T W and offset = beta^T W.

m comes as it is, not as rstd * m: the kernel that adds up the partials and stores rstd would store
the product too, which Triton 3.6 fails to compile in some orders (docs/gotchas.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import aten, fake

#: On nodes that the forward pass stores and the backward pass must not compute again.
KEEP = "coda_keep"


@dataclass(frozen=True)
class Shift:
    """What LayerNorm has beside the row scale: ``center`` (M, 1) times ``colsum`` (N,) is taken
    away before it, and ``offset`` (N,), None where the norm has no bias, added behind. All in
    float32 (float64 for float64 GEMMs)."""

    center: Node
    colsum: Node
    offset: Node | None


def scale(
    graph: Graph,
    gemm: Node,
    h: Node,
    rstd: Node,
    *,
    pattern: tuple[str, str],
    shift: Shift | None = None,
) -> Node:
    """``gemm(n, W)`` becomes ``gemm(h, W) * rstd``, or what the ``shift`` says; a bias is added
    behind that. ``rstd`` is (M, 1). Returns what takes the place of ``gemm``."""
    dtype, wide = fake(gemm).dtype, fake(rstd).dtype
    put = Put(graph, like=gemm, pattern=pattern)
    with graph.inserting_before(gemm):
        z = put(aten.mm.default, h, gemm_inputs(gemm)[1])
        z = put.cast(z, wide)
        if shift is not None:
            z = put(aten.sub.Tensor, z, put(aten.mul.Tensor, shift.center, shift.colsum))
        z = put(aten.mul.Tensor, z, rstd)
        bias = gemm.args[0] if gemm.target is aten.addmm.default else None
        if shift is not None:
            offset = shift.offset
            if offset is not None and bias is not None and plain_bias(gemm):
                offset, bias = put(aten.add.Tensor, offset, bias), None  # N values, not M x N
            if offset is not None:
                z = put(aten.add.Tensor, z, offset)
        if bias is not None:
            z = _biased(put, gemm, z)
        z = put.cast(z, dtype)
    gemm.replace_all_uses_with(z)
    inputs = gemm.all_input_nodes
    graph.erase_node(gemm)
    prune(inputs)
    return z


def _biased(put: Put, gemm: Node, z: Node) -> Node:
    if (alpha := gemm.kwargs.get("alpha", 1)) != 1:
        z = put(aten.mul.Tensor, z, alpha)
    bias: Any = gemm.args[0]
    if (beta := gemm.kwargs.get("beta", 1)) == 0:
        return z  # torch reads no bias then, be it NaN
    if beta != 1:
        bias = put(aten.mul.Tensor, bias, beta)
    return put(aten.add.Tensor, z, bias)


def plain_bias(gemm: Node) -> bool:
    """Does the ``addmm`` add one value a column, unscaled?"""
    return not gemm.kwargs and fake(gemm.args[0]).dim() == 1


def wide_of(x: Node) -> torch.dtype:
    """The dtype of a norm's statistics: float32, or float64 for float64."""
    return torch.promote_types(fake(x).dtype, torch.float32)
