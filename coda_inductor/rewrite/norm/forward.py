# SPDX-License-Identifier: Apache-2.0
"""One norm is deferred: its statistics, the operand of the GEMMs that read it, these GEMMs.

Before (for every GEMM that reads n)::

    n = x * scale * gamma;  z = n @ W + b

After (rules R1, R2; here RMSNorm, the norm's record defines scale)::

    h = x * gamma;  scale = rsqrt(mean(x * x) + eps);  z = (h @ W) * scale + b

Why it is valid: n = D_scale h, and (D_r X) W = D_r (X W).
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.gemms import bias_of, gemm_inputs
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.splice import splice
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import NORMS


@dataclass(frozen=True)
class Deferred:
    """The nodes that replace a norm: the operand ``h`` (M, d) of its GEMMs; the ``statistics``
    (..., 1) that its gradient reads, first the row scale, ``flat`` as (M, 1); ``gamma``, if any."""

    name: str
    gamma: Node | None
    h: Node
    statistics: list[Node]
    flat: Node


#: A GEMM that follows a norm: its result z (M, N), and the gradient dz of that.
Product = tuple[Node, Node]


def defer(norm: Node, uses: Uses, scope: Scope) -> tuple[Deferred, list[Product] | None]:
    """Rewrite the forward pass of ``norm``, whose readers are ``uses``. Also returns the GEMMs that
    read it, with their gradients; None if they cannot be distinguished."""
    pattern = (NORMS[norm.target].name, norm.name)
    deferred = statistics(Put(norm, pattern=pattern), norm, uses.dtype)
    gradients = uses.gradients()
    products: dict[Node, Node] = {}
    for gemm in uses.gemms:
        products[gemm] = _scaled(Put(gemm, pattern=pattern), gemm, deferred, scope)
        replace(gemm, products[gemm])
    if gradients is None:
        return deferred, None
    # The order in which epilogues add their parts up, and so the keys of programs, hang on it.
    return deferred, [(products[gemm], dz) for gemm, dz in gradients.items()]


def statistics(put: Put, norm: Node, dtype: torch.dtype) -> Deferred:
    """Insert the nodes that replace ``norm`` for GEMMs in ``dtype``; see the module."""
    record, kwargs = NORMS[norm.target], arguments(norm)
    x, gamma = kwargs["x"], kwargs["weight"]
    wide = statistics_dtype(fake(x).dtype)
    v = put.cast(x, wide)
    args = (v, *(kwargs[name] for name in record.numbers))
    rows = splice(norm, record.rows, args, meta={"coda_pattern": put.pattern})
    h = v if gamma is None else put.mul(v, put.cast(gamma, wide))
    h = put.reshape(put.cast(h, dtype), [-1, fake(x).shape[-1]])
    flat = put.reshape(rows[0], [-1, 1])
    return Deferred(record.name, gamma, h, list(rows), flat)


def _scaled(put: Put, gemm: Node, norm: Deferred, scope: Scope) -> Node:
    """``gemm(h, W)``, with the row scale behind it, and then the bias."""
    product = put(aten.mm.default, norm.h, gemm_inputs(gemm)[1])
    scope.replace(gemm, product)
    z = put.mul(put.cast(product, fake(norm.flat).dtype), norm.flat)
    if bias_of(gemm) is not None:
        z = _biased(put, gemm, z)
    return put.cast(z, fake(gemm).dtype)


def _biased(put: Put, gemm: Node, z: Node) -> Node:
    bias, alpha, beta = (arguments(gemm)[name] for name in ("input", "alpha", "beta"))
    z = z if alpha == 1 else put.mul(z, alpha)
    if beta == 0:
        return z  # torch reads no bias then, be it NaN
    return put.add(z, bias if beta == 1 else put.mul(bias, beta))
