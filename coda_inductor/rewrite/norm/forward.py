# SPDX-License-Identifier: Apache-2.0
"""One norm is deferred: its statistics, the operand of the GEMMs that read it, these GEMMs.

Before (for every GEMM that reads n)::

    n, rstd = rms_norm(x, gamma, eps);                   z = n @ W + b
    n, mean, rstd = layer_norm(x, gamma, beta, eps);     z = n @ W + b

After, for RMSNorm (rules R1, R2)::

    h = x * gamma;  rstd = rsqrt(mean(x * x) + eps);  z = (h @ W) * rstd + b

and for LayerNorm (rule R5), ``pivot`` being any value a row (``pivot`` chooses it)::

    v = x - pivot;  h = v * gamma;  m = mean(v);  rstd = rsqrt(mean(v * v) - m**2 + eps)
    z = (h @ W - m * colsum) * rstd + (offset + b);  colsum = gamma^T W;  offset = beta^T W

Why it is valid: n = D_rstd (x * gamma), and (D_r X) W = D_r (X W); for LayerNorm
n = D_rstd (v - m 1^T) diag(gamma) + 1 beta^T, multiplied out, which does not change when a row is
shifted. colsum and offset are computed at every call, for W is what training changes; a kernel of
Inductor's reads W once for both, which ``Plan.norm_loses`` charges.

m comes as it is, not as rstd * m: the kernel that adds up the partials and stores rstd would store
the product too, which Triton 3.6 fails to compile in some orders (docs/gotchas.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import bias_of, gemm_inputs, plain_bias
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sizes import same
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import layer_norm, rms_norm

#: Norm -> what counts when it is deferred.
NORMS = {rms_norm: "rms_norm", layer_norm: "layer_norm"}


@dataclass(frozen=True)
class Deferred:
    """What took the place of a norm: the operand ``h`` (M, d) of its GEMMs; ``rstd`` (..., 1), and
    as ``flat`` (M, 1). For LayerNorm also the ``mean`` (..., 1) of x, and as ``center`` (M, 1) that
    of what ``h`` was made of; None for RMSNorm."""

    gamma: Node | None
    beta: Node | None
    h: Node
    rstd: Node
    flat: Node
    mean: Node | None
    center: Node | None


@dataclass(frozen=True)
class Shift:
    """What LayerNorm has beside the row scale, in float32 (float64 for float64 GEMMs): the center
    times ``colsum`` (N,) is taken away before it; ``added`` (N,), None where there is nothing to
    add, is the offset and the GEMM's plain bias."""

    colsum: Node
    added: Node | None


#: A GEMM that follows an RMSNorm: its result z (M, N), and the gradient dz of that.
Product = tuple[Node, Node]


def defer(graph: Graph, norm: Node, found: Uses) -> tuple[Deferred, list[Product] | None]:
    """Rewrite the forward pass of ``norm``, whose readers are ``found``. Returns the GEMMs that
    follow too, with their gradients; None where these cannot be told apart."""
    pattern = (NORMS[norm.target], norm.name)
    deferred = statistics(Put(graph, like=norm, pattern=pattern), norm, found.dtype, found.pivot)
    gradients = found.gradients()
    made: dict[Node, Node] = {}
    for gemm in found.gemms:
        with graph.inserting_before(gemm):
            shift = _shift(Put(graph, like=gemm), gemm, deferred)
            z = _scale(Put(graph, like=gemm, pattern=pattern), gemm, deferred, shift)
        made[gemm] = z
        gemm.replace_all_uses_with(z)
        prune([gemm])
    if gradients is None:
        return deferred, None
    # The order in which epilogues add their parts up, and so the keys of programs, hang on it.
    return deferred, [(made[gemm], dz) for gemm, dz in gradients.items()]


def statistics(put: Put, norm: Node, dtype: torch.dtype, pivot: Node | None) -> Deferred:
    """What takes the place of ``norm`` for GEMMs that read it in ``dtype``; see the module."""
    given = arguments(norm)
    x, gamma, beta = given["x"], given["weight"], given.get("bias")
    wide, m, mean, center = statistics_dtype(fake(x).dtype), None, None, None
    with put.graph.inserting_before(norm):
        if pivot is not None and not same(fake(pivot).shape[:-1], fake(x).shape[:-1]):
            pivot = put.reshape(pivot, [*put.sizes(x)[:-1], 1])
        v = put.cast(x, wide)
        if pivot is not None:
            v = put.sub(v, pivot)
            m = put(aten.mean.dim, v, [-1], True)
        variance = put(aten.mean.dim, put.mul(v, v), [-1], True)
        if m is not None:
            variance = _centered(put, variance, m, dtype)
        rstd = put(aten.rsqrt.default, put.add(variance, given["eps"]))
        h = v if gamma is None else put.mul(v, put.cast(gamma, wide))
        h = put.reshape(put.cast(h, dtype), [-1, fake(x).shape[-1]])
        flat = put.reshape(rstd, [-1, 1])
        if m is not None:
            mean, center = put.add(m, pivot), put.reshape(m, [-1, 1])
    return Deferred(gamma, beta, h, rstd, flat, mean, center)


def _centered(put: Put, moment: Node, mean: Node, dtype: torch.dtype) -> Node:
    """The biased variance of each row whose mean is small, by its second moment: the partial sums
    of one pass make both.

    At least what rounding the row to ``dtype`` at its mean would add to it, a twelfth of the square
    of the spacing there: eager's variance has that. Less is what is left of float32 sums that
    cancel, and may be nothing or negative.
    """
    square = put.mul(mean, mean)
    variance = put.sub(moment, square)
    return put(aten.maximum.default, variance, put.mul(square, torch.finfo(dtype).eps ** 2 / 12))


def _shift(put: Put, gemm: Node, norm: Deferred) -> Shift | None:
    """gamma^T W and beta^T W + b; None for RMSNorm."""
    if norm.center is None:
        return None
    wide = fake(norm.center).dtype
    w = put.cast(gemm_inputs(gemm)[1], wide)

    def times(vector: Node | None) -> Node:
        if vector is None:
            return put.column_sum(w)
        return put.column_sum(put.mul(w, put.reshape(put.cast(vector, wide), [-1, 1])))

    colsum, bias = times(norm.gamma), bias_of(gemm) if plain_bias(gemm) else None
    if norm.beta is None:
        return Shift(colsum, bias)
    offset = times(norm.beta)
    return Shift(colsum, offset if bias is None else put.add(offset, bias))


def _scale(put: Put, gemm: Node, norm: Deferred, shift: Shift | None) -> Node:
    """``gemm(h, W) * rstd``, or what the ``shift`` says; a bias is added after that."""
    z = put.cast(put(aten.mm.default, norm.h, gemm_inputs(gemm)[1]), fake(norm.flat).dtype)
    if shift is not None:
        z = put.sub(z, put.mul(norm.center, shift.colsum))
    z = put.mul(z, norm.flat)
    if shift is not None and shift.added is not None:
        z = put.add(z, shift.added)
    if bias_of(gemm) is not None and (shift is None or not plain_bias(gemm)):
        z = _biased(put, gemm, z)
    return put.cast(z, fake(gemm).dtype)


def _biased(put: Put, gemm: Node, z: Node) -> Node:
    bias, _, _, beta, alpha = arguments(gemm).values()
    z = z if alpha == 1 else put.mul(z, alpha)
    if beta == 0:
        return z  # torch reads no bias then, be it NaN
    return put.add(z, bias if beta == 1 else put.mul(bias, beta))
