# SPDX-License-Identifier: Apache-2.0
"""One norm is deferred: its statistics, the operand of the GEMMs that read it, these GEMMs.

Before (for every GEMM that reads n)::

    n = (x - shift) * scale * gamma + beta;  z = n @ W + b

After, for a norm without shift such as RMSNorm (rules R1, R2); its record defines scale::

    h = x * gamma;  scale = rsqrt(mean(x * x) + eps);  z = (h @ W) * scale + (offset + b)

and for a norm with a shift such as LayerNorm (rule R5), with any pivot per row (``pivot`` chooses
it)::

    v = x - pivot;  h = v * gamma;  m = mean(v);  scale = rsqrt(mean(v * v) - m**2 + eps)
    z = (h @ W - m * colsum) * scale + (offset + b);  colsum = gamma^T W;  offset = beta^T W

Why it is valid: n = D_scale (v - m 1^T) diag(gamma) + 1 beta^T, multiplied out, and (D_r X) W = D_r
(X W); a norm with a shift does not change when a row is shifted. colsum and offset are computed at
every call, because training changes W; a kernel of Inductor's reads W once for both, a cost that
``Plan.norm_loses`` includes.

m is passed, not rstd * m: the kernel that adds up the partials and stores rstd would store the
product too, which Triton 3.6 fails to compile in some orders (gotchas.md).
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.gemms import bias_of, gemm_inputs, plain_bias
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import NORMS


@dataclass(frozen=True)
class Deferred:
    """The nodes that replace a norm: the operand ``h`` (M, d) of its GEMMs; the ``statistics``
    (..., 1) that its gradient reads, the row scale first, which is ``flat`` as (M, 1); ``gamma``
    and ``beta``, if any. For a norm with a shift, also the ``shift`` (M, 1) of the input of ``h``,
    and the ``mean`` (..., 1) of x."""

    name: str
    gamma: Node | None
    beta: Node | None
    h: Node
    statistics: list[Node]
    flat: Node
    shift: Node | None
    mean: Node | None


#: A GEMM that follows a norm: its result z (M, N), and the gradient dz of that.
Product = tuple[Node, Node]


def defer(norm: Node, uses: Uses, scope: Scope) -> tuple[Deferred, list[Product] | None]:
    """Rewrite the forward pass of ``norm``, whose readers are ``uses``. Also returns the GEMMs that
    read it, with their gradients; None if they cannot be distinguished."""
    pattern = (NORMS[norm.target].name, norm.name)
    deferred = statistics(Put(norm, pattern=pattern), norm, uses.dtype, uses.pivot)
    gradients = uses.gradients()
    products: dict[Node, Node] = {}
    for gemm in uses.gemms:
        products[gemm] = _scaled(Put(gemm, pattern=pattern), gemm, deferred, scope)
        replace(gemm, products[gemm])
    if gradients is None:
        return deferred, None
    # The order in which epilogues add their parts up, and so the keys of programs, hang on it.
    return deferred, [(products[gemm], dz) for gemm, dz in gradients.items()]


def statistics(put: Put, norm: Node, dtype: torch.dtype, pivot: Node | None = None) -> Deferred:
    """Insert the nodes that replace ``norm`` for GEMMs in ``dtype``; see the module."""
    record, kwargs = NORMS[norm.target], arguments(norm)
    x, gamma, shift, mean = kwargs["x"], kwargs["weight"], None, None
    wide = statistics_dtype(fake(x).dtype)
    if pivot is not None and not same(fake(pivot).shape[:-1], fake(x).shape[:-1]):
        pivot = put.reshape(pivot, [*put.sizes(x)[:-1], 1])
    v = put.cast(x, wide)
    v = v if pivot is None else put.sub(v, pivot)
    args = (v, dtype, *(kwargs[name] for name in record.numbers))
    rows, means = splice(norm, record.rows, args, meta={"coda_pattern": put.pattern})
    h = v if gamma is None else put.mul(v, put.cast(gamma, wide))
    h = put.reshape(put.cast(h, dtype), [-1, fake(x).shape[-1]])
    flat = put.reshape(rows[0], [-1, 1])
    if pivot is not None:
        mean, shift = put.add(means[0], pivot), put.reshape(means[0], [-1, 1])
    return Deferred(record.name, gamma, kwargs.get("bias"), h, list(rows), flat, shift, mean)


def _scaled(put: Put, gemm: Node, norm: Deferred, scope: Scope) -> Node:
    """``gemm(h, W)``, with the subtraction before the row scale and the addition after it."""
    colsum, offset = _vectors(gemm, norm)
    product = put(aten.mm.default, norm.h, gemm_inputs(gemm)[1])
    scope.replace(gemm, product)
    z, shift, scale = put.cast(product, fake(norm.flat).dtype), norm.shift, norm.flat
    parts = next((put.sizes(v)[0] for v in (colsum, offset) if v and fake(v).dim() > 1), None)
    if parts is not None:
        rows = (n and put.reshape(n, [parts, -1, fake(n).shape[1]]) for n in (z, shift, scale))
        z, shift, scale = rows
    if shift is not None:
        z = put.sub(z, put.mul(shift, colsum))
    z = put.mul(z, scale)
    if offset is not None:
        z = put.add(z, offset)
    if parts is not None:
        z = put.reshape(z, [-1, fake(product).shape[1]])
    if bias_of(gemm) is not None and not plain_bias(gemm):
        z = _biased(put, gemm, z)
    return put.cast(z, fake(gemm).dtype)


def _vectors(gemm: Node, norm: Deferred) -> tuple[Node | None, Node | None]:
    """``gamma^T W`` (None without a shift) and ``beta^T W + b`` (None without beta and bias). They
    are (N,), or (B, 1, N) if gamma or beta differ between the rows of a batch, in float32 (in
    float64 for float64 GEMMs)."""
    put, wide = Put(gemm), fake(norm.flat).dtype
    bias = bias_of(gemm) if plain_bias(gemm) else None
    if norm.shift is None and norm.beta is None:
        return None, bias
    w = put.cast(gemm_inputs(gemm)[1], wide)

    def times(vector: Node) -> Node:
        if fake(vector).numel() != fake(w).shape[0]:
            rows = put.reshape(put.cast(vector, wide), [-1, fake(w).shape[0], 1])
            return put(aten.sum.dim_IntList, put.mul(rows, w), [1], True)
        return put.column_sum(put.mul(w, put.reshape(put.cast(vector, wide), [-1, 1])))

    colsum = None
    if norm.shift is not None:
        colsum = put.column_sum(w) if norm.gamma is None else times(norm.gamma)
    if norm.beta is None:
        return colsum, bias
    offset = times(norm.beta)
    return colsum, offset if bias is None else put.add(offset, bias)


def _biased(put: Put, gemm: Node, z: Node) -> Node:
    bias, alpha, beta = (arguments(gemm)[name] for name in ("input", "alpha", "beta"))
    z = z if alpha == 1 else put.mul(z, alpha)
    if beta == 0:
        return z  # torch reads no bias then, be it NaN
    return put.add(z, bias if beta == 1 else put.mul(bias, beta))
