# SPDX-License-Identifier: Apache-2.0
"""One norm is deferred: its statistics, the operand of the GEMMs that read it, these GEMMs.

Before (for every GEMM that reads n)::

    n, rstd = rms_norm(x, gamma, eps);                   z = n @ W + b
    n, mean, rstd = layer_norm(x, gamma, beta, eps);     z = n @ W + b

After, for RMSNorm (rules R1, R2)::

    h = x * gamma;  rstd = rsqrt(mean(x * x) + eps)
    z = (h @ W) * rstd + b

and for LayerNorm (rule R5), ``pivot`` being one value a row (``pivot`` says which)::

    v = x - pivot;  h = v * gamma;  m = mean(v);  rstd = rsqrt(mean(v * v) - m**2 + eps)
    z = (h @ W - m * (gamma^T W)) * rstd + (beta^T W + b);  mean = m + pivot

Why it is valid: n = D_rstd (x * gamma), and (D_r X) W = D_r (X W); for LayerNorm
n = D_rstd (v - m 1^T) diag(gamma) + 1 beta^T, multiplied out, which does not change when a row is
shifted. gamma^T W and beta^T W are computed at every call, for W is what training changes; a kernel
of Inductor's reads W once for both, which ``Policy.norm_loses`` charges.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import bias_of, gemm_inputs
from coda_inductor.graph.nodes import aten, fake, readers, renames
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.rewrite.norm.backward import Deferred, Product, differentiate
from coda_inductor.rewrite.norm.consumers import Shift, scale
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.rewrite.recompute import KEEP
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import layer_norm, rms_norm

#: Norm -> what counts when it is deferred.
NORMS = {rms_norm: "rms_norm", layer_norm: "layer_norm"}


def defer(graph: Graph, norm: Node, found: Uses, scope: Scope, pivot: Node | None) -> Node | None:
    """Apply the rewrite to ``norm``, whose readers are ``found``, and to its gradient. A LayerNorm
    needs a ``pivot``, one value a row. Returns the mean of its input (..., 1); None for RMSNorm."""
    pattern = (NORMS[norm.target], norm.name)
    deferred = _statistics(graph, norm, found.dtype, pivot, pattern)
    gradients = found.products(biased=pivot is not None)
    products: dict[Node, Product] = {}
    for gemm in found.gemms:
        shift, bias = _shift(graph, gemm, deferred), bias_of(gemm)
        z = scale(graph, gemm, deferred.h, deferred.flat, shift, pattern)
        products[gemm] = Product(z, shift, bias)
    known = None if gradients is None else [(products[g], dz) for g, dz in gradients.items()]
    if known is not None and pivot is None and not all(_at_hand(p.z, scope) for p, _ in known):
        known = None
    # Without the dot, a kernel after the dgrad finishes dx. It reads x, and makes h of it as well.
    deferred.h.args[0].meta[KEEP] = known is not None or pivot is not None
    differentiate(graph, found, deferred, known)
    prune(list(norm.users))
    return deferred.mean


def _statistics(
    graph: Graph, norm: Node, dtype: torch.dtype, pivot: Node | None, pattern: tuple[str, str]
) -> Deferred:
    x, gamma = norm.args[:2]
    beta, eps = norm.args[2:4] if norm.target is layer_norm else (None, norm.args[2])
    wide, m, mean, center = statistics_dtype(fake(x).dtype), None, None, None
    put = Put(graph, like=norm, pattern=pattern)
    with graph.inserting_before(norm):
        if pivot is not None and not same(fake(pivot).shape[:-1], fake(x).shape[:-1]):
            pivot = put(aten.reshape.default, pivot, [*put.sizes(x)[:-1], 1])
        v = put.cast(x, wide)
        if pivot is not None:
            v = put(aten.sub.Tensor, v, pivot)
            m = put(aten.mean.dim, v, [-1], True)
        moment = put(aten.mean.dim, put(aten.mul.Tensor, v, v), [-1], True)
        variance = moment if m is None else _variance(put, moment, m, dtype)
        rstd = put(aten.rsqrt.default, put(aten.add.Tensor, variance, eps))
        h = v if gamma is None else put(aten.mul.Tensor, v, put.cast(gamma, wide))
        h = put(aten.reshape.default, put.cast(h, dtype), [-1, fake(x).shape[-1]])
        flat = put(aten.reshape.default, rstd, [-1, 1])
        if m is not None:
            mean = put(aten.add.Tensor, m, pivot)
            center = put(aten.reshape.default, m, [-1, 1])
    return Deferred(gamma, beta, h, rstd, flat, mean, center)


def _variance(put: Put, moment: Node, mean: Node, dtype: torch.dtype) -> Node:
    """The biased variance of each row whose mean is small, by its second moment: the partial sums
    of one pass make both.

    At least what rounding the row to ``dtype`` at its mean would add to it, a twelfth of the square
    of the spacing there: eager's variance has that. Less is what is left of float32 sums that
    cancel, and may be nothing or negative.
    """
    square = put(aten.mul.Tensor, mean, mean)
    variance = put(aten.sub.Tensor, moment, square)
    least = put(aten.mul.Tensor, square, torch.finfo(dtype).eps ** 2 / 12)
    return put(aten.maximum.default, variance, least)


def _shift(graph: Graph, gemm: Node, norm: Deferred) -> Shift | None:
    """The mean (M, 1) with gamma^T W and beta^T W, each (N,); None for RMSNorm."""
    if norm.center is None:
        return None
    weight, wide = gemm_inputs(gemm)[1], fake(norm.center).dtype
    put = Put(graph, like=gemm)
    with graph.inserting_before(gemm):
        w = put.cast(weight, wide)

        def times(vector: Node | None) -> Node:
            if vector is None:
                return put(aten.sum.dim_IntList, w, [0])
            column = put(aten.reshape.default, put.cast(vector, wide), [-1, 1])
            return put(aten.sum.dim_IntList, put(aten.mul.Tensor, w, column), [0])

        return Shift(
            norm.center, times(norm.gamma), None if norm.beta is None else times(norm.beta)
        )


def _at_hand(z: Node, scope: Scope) -> bool:
    """Is the product ``z`` in memory in the backward pass anyway? Queries and keys are not: what
    attention reads are their rotations."""
    _, users = readers(z, lambda u: renames(u) or u.target is aten.permute.default)
    return any(user not in scope.forward for user in users)
