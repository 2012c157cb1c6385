# SPDX-License-Identifier: Apache-2.0
"""A GEMM that reads a deferred norm: what follows its product.

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

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import bias_of, gemm_inputs, plain_bias
from coda_inductor.graph.nodes import aten, fake


@dataclass(frozen=True)
class Shift:
    """What LayerNorm has beside the row scale: ``center`` (M, 1) times ``colsum`` (N,) is taken
    away before it, and ``offset`` (N,), None where the norm has no bias, is added after it. All in
    float32 (float64 for float64 GEMMs)."""

    center: Node
    colsum: Node
    offset: Node | None


def scale(
    graph: Graph, gemm: Node, h: Node, rstd: Node, shift: Shift | None, pattern: tuple[str, str]
) -> Node:
    """``gemm(n, W)`` becomes ``gemm(h, W) * rstd``, or what the ``shift`` says; a bias is added
    after that. ``rstd`` is (M, 1). Returns what takes the place of ``gemm``."""
    put = Put(graph, like=gemm, pattern=pattern)
    bias = bias_of(gemm)
    with graph.inserting_before(gemm):
        z = put.cast(put(aten.mm.default, h, gemm_inputs(gemm)[1]), fake(rstd).dtype)
        if shift is not None:
            z = put(aten.sub.Tensor, z, put(aten.mul.Tensor, shift.center, shift.colsum))
        z = put(aten.mul.Tensor, z, rstd)
        if shift is not None and (offset := shift.offset) is not None:
            if bias is not None and plain_bias(gemm):
                offset, bias = put(aten.add.Tensor, offset, bias), None  # N values, not M x N
            z = put(aten.add.Tensor, z, offset)
        if bias is not None:
            z = _biased(put, gemm, z)
        z = put.cast(z, fake(gemm).dtype)
    gemm.replace_all_uses_with(z)
    prune([gemm])
    return z


def _biased(put: Put, gemm: Node, z: Node) -> Node:
    if (alpha := gemm.kwargs.get("alpha", 1)) != 1:
        z = put(aten.mul.Tensor, z, alpha)
    bias: Any = bias_of(gemm)
    if (beta := gemm.kwargs.get("beta", 1)) == 0:
        return z  # torch reads no bias then, be it NaN
    if beta != 1:
        bias = put(aten.mul.Tensor, bias, beta)
    return put(aten.add.Tensor, z, bias)
