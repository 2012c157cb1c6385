# SPDX-License-Identifier: Apache-2.0
"""One norm is deferred: its statistics, the operand of the GEMMs that read it, these GEMMs.

Before (for every GEMM that reads n)::

    n = (x - shift) * scale * gamma + beta;  z = n @ W + b

After, for a norm without shift, as RMSNorm is (rules R1, R2); its record says what scale is::

    h = x * gamma;  scale = rsqrt(mean(x * x) + eps);  z = (h @ W) * scale + b

and for one with a shift, as LayerNorm (rule R5), ``pivot`` being any value a row (``pivot`` chooses
it)::

    v = x - pivot;  h = v * gamma;  m = mean(v);  scale = rsqrt(mean(v * v) - m**2 + eps)
    z = (h @ W - m * colsum) * scale + (offset + b);  colsum = gamma^T W;  offset = beta^T W

Why it is valid: n = D_scale (v - m 1^T) diag(gamma) + 1 beta^T, multiplied out, and
(D_r X) W = D_r (X W); a norm with a shift does not change when a row is shifted. colsum and offset
are computed at every call, for W is what training changes; a kernel of Inductor's reads W once for
both, which ``Plan.norm_loses`` charges.

m comes as it is, not as rstd * m: the kernel that adds up the partials and stores rstd would store
the product too, which Triton 3.6 fails to compile in some orders (docs/gotchas.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import bias_of, gemm_inputs, plain_bias
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import NORMS


@dataclass(frozen=True)
class Deferred:
    """What took the place of a norm: the operand ``h`` (M, d) of its GEMMs; the ``statistics``
    (..., 1) that its gradient reads, the row scale first, which is ``flat`` as (M, 1). Lists are
    empty where there is none: ``gamma``, ``beta``; the ``shifts`` (M, 1) of what ``h`` was made of,
    and the ``means`` (..., 1) of x."""

    name: str
    gamma: list[Node]
    beta: list[Node]
    h: Node
    statistics: list[Node]
    flat: Node
    shifts: list[Node]
    means: list[Node]


#: A GEMM that follows a norm: its result z (M, N), and the gradient dz of that.
Product = tuple[Node, Node]


def defer(graph: Graph, norm: Node, found: Uses) -> tuple[Deferred, list[Product] | None]:
    """Rewrite the forward pass of ``norm``, whose readers are ``found``. Returns the GEMMs that
    follow too, with their gradients; None where these cannot be told apart."""
    pattern = (NORMS[norm.target].name, norm.name)
    deferred = statistics(Put(graph, like=norm, pattern=pattern), norm, found.dtype, found.pivots)
    gradients = found.gradients()
    made: dict[Node, Node] = {}
    for gemm in found.gemms:
        with graph.inserting_before(gemm):
            shifts, added = _vectors(Put(graph, like=gemm), gemm, deferred)
            put = Put(graph, like=gemm, pattern=pattern)
            made[gemm] = z = _scale(put, gemm, deferred, shifts, added)
        gemm.replace_all_uses_with(z)
        prune([gemm])
    if gradients is None:
        return deferred, None
    # The order in which epilogues add their parts up, and so the keys of programs, hang on it.
    return deferred, [(made[gemm], dz) for gemm, dz in gradients.items()]


def statistics(put: Put, norm: Node, dtype: torch.dtype, pivots: list[Node]) -> Deferred:
    """What takes the place of ``norm`` for GEMMs that read it in ``dtype``; see the module."""
    record, given = NORMS[norm.target], arguments(norm)
    x, wide = given["x"], statistics_dtype(fake(given["x"]).dtype)
    gamma, beta = ([v for v in [given.get(name)] if v is not None] for name in ("weight", "bias"))
    with put.graph.inserting_before(norm):
        pivots = [_shaped(put, pivot, x) for pivot in pivots]
        v = functools.reduce(put.sub, pivots, put.cast(x, wide))
        args = (v, dtype, *(given[name] for name in record.numbers))
        meta = {"coda_pattern": put.pattern}
        rows, shifts = splice(put.graph, norm, record.rows, args, like=norm, meta=meta)
        h = functools.reduce(lambda h, vector: put.mul(h, put.cast(vector, wide)), gamma, v)
        h = put.reshape(put.cast(h, dtype), [-1, fake(x).shape[-1]])
        flat = put.reshape(rows[0], [-1, 1])
        means = [put.add(m, pivot) for m, pivot in zip(shifts, pivots, strict=True)]
        shifts = [put.reshape(m, [-1, 1]) for m in shifts]
    return Deferred(record.name, gamma, beta, h, list(rows), flat, shifts, means)


def _shaped(put: Put, pivot: Node, x: Node) -> Node:
    """``pivot`` with the leading dimensions of ``x``."""
    if same(fake(pivot).shape[:-1], fake(x).shape[:-1]):
        return pivot
    return put.reshape(pivot, [*put.sizes(x)[:-1], 1])


def _vectors(put: Put, gemm: Node, norm: Deferred) -> tuple[list[Node], list[Node]]:
    """What is taken away from the product before the row scale, ``m gamma^T W`` for each shift m,
    and what is added after it: ``beta^T W + b``, (N,), as far as there is any. All in float32
    (float64 for float64 GEMMs)."""
    wide = fake(norm.flat).dtype
    added = [bias_of(gemm)] if plain_bias(gemm) else []
    if not norm.shifts and not norm.beta:
        return [], added
    w = put.cast(gemm_inputs(gemm)[1], wide)

    def times(vectors: list[Node]) -> Node:
        columns = [put.reshape(put.cast(vector, wide), [-1, 1]) for vector in vectors]
        return put.column_sum(functools.reduce(put.mul, columns, w))

    colsums = [times(norm.gamma) for _ in norm.shifts]
    added = [*(times([beta]) for beta in norm.beta), *added]
    return colsums, [functools.reduce(put.add, added)] if added else []


def _scale(put: Put, gemm: Node, norm: Deferred, colsums: list[Node], added: list[Node]) -> Node:
    """``gemm(h, W)`` with what ``_vectors`` says around the row scale; a bias that is no vector is
    added after that."""
    z = put.cast(put(aten.mm.default, norm.h, gemm_inputs(gemm)[1]), fake(norm.flat).dtype)
    for shift, colsum in zip(norm.shifts, colsums, strict=True):
        z = put.sub(z, put.mul(shift, colsum))
    z = functools.reduce(put.add, added, put.mul(z, norm.flat))
    if bias_of(gemm) is not None and not plain_bias(gemm):
        z = _biased(put, gemm, z)
    return put.cast(z, fake(gemm).dtype)


def _biased(put: Put, gemm: Node, z: Node) -> Node:
    bias, _, _, beta, alpha = arguments(gemm).values()
    z = z if alpha == 1 else put.mul(z, alpha)
    if beta == 0:
        return z  # torch reads no bias then, be it NaN
    return put.add(z, bias if beta == 1 else put.mul(bias, beta))
