# SPDX-License-Identifier: Apache-2.0
"""The gradients around a deferred norm, after the GEMMs that make its own (rules R3, R4).

Before (x is M x d; one z = n @ W + b, dz its gradient, for every GEMM)::

    dn = sum of dz @ W.T;  dx, dgamma, dbeta = norm_backward(dn, x, gamma, ...);  dW = n.T @ dz

After, where every dz is made in the epilogue of a GEMM (through SwiGLU)::

    zs = dz * rstd;  second = sum of rowsum(dz * (z - beta^T W - b))
    first = sum of rowsum(dz * (gamma^T W))        (all three where dz is made)
    s = sum of zs @ W.T                            one GEMM or several, its epilogue:
    dx = s * gamma - (rstd**2 / d) * second * (x - mean) - (rstd / d) * first
    dgamma = colsum(s * (x - mean));  dbeta = colsum(s / rstd)    (partials)
    dW = h.T @ zs - gamma colsum(m * zs)^T + beta colsum(dz)^T    h, m: as the forward stored them

and elsewhere (attention makes dz, or the caller) s = (sum of dz @ W.T) * rstd, zs only for dW.
RMSNorm has no mean, m, beta and first.

Why it is valid: with nh = (x - mean) rstd and p = dn gamma, ``layer_norm_backward`` says
dx = rstd (p - rowmean(p) - nh rowmean(p nh)). s = rstd dn (R1). rowsum(p) = rowsum((dz W^T) gamma)
= rowsum(dz (gamma^T W)) and rowsum(p nh) = rowsum((dz W^T)(n - beta)) = rowsum(dz ((n - beta) W))
(R3), n W being z without its bias. n = D_rstd h - (rstd m) gamma^T + 1 beta^T, transposed and
multiplied with dz, is dW (R4).

Rounding: zs and z are rounded to 16 bits. Where W has a singular value much larger than the others
and dz hardly any of its direction, that error is all there is in dx: 40 times eager's at 1000 times
the others, if dz itself was exact. Where a GEMM makes dz, eager rounds the GEMM's result and dz, an
error of the same size, and ours takes its place. Elsewhere dz is in memory, and is read as it is.

Where z is not at hand (a bias hides it, a weight is shared by two GEMMs, nothing else would keep it
until then), or no GEMM makes dz, the row sums are those of s * gamma and s * gamma * (x - mean):
known only after the GEMM, so that a kernel of Inductor's finishes dx.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune, settle
from coda_inductor.graph.gemms import OPTIONAL
from coda_inductor.graph.nodes import aten, base, fake, readers, renames
from coda_inductor.graph.sides import Scope
from coda_inductor.rewrite.norm.forward import Deferred, Product
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.rewrite.recompute import KEEP


def differentiate(
    graph: Graph, found: Uses, norm: Deferred, products: list[Product] | None, scope: Scope
) -> None:
    """Rewrite the gradients of a norm whose forward pass has been rewritten already. ``products``:
    the GEMMs that follow, None where they cannot be told apart."""
    if norm.mean is None and not all(_at_hand(p.z, scope) for p in products or ()):
        products = None
    # Without the dot of RMSNorm, a kernel after the dgrad finishes dx. It reads x, and makes h too.
    norm.h.args[0].meta[KEEP] = norm.mean is not None or products is not None
    scaled = _Scaled(graph, norm)
    old = [n for gemm in (*found.wgrads, *found.dgrads) for n in gemm.all_input_nodes]
    for wgrad, n_is_left in found.wgrads.items():
        _weight_gradient(Put(graph, like=wgrad), wgrad, n_is_left, norm, scaled)
    early = found.early
    for dgrad in found.dgrads if early else ():
        dz, weight = dgrad.args
        dgrad.args = (scaled(dz, dgrad), weight)
    if (backward := found.backward) is not None:
        with graph.inserting_before(backward):
            results = _gradients(graph, backward, norm, early, products if early else None)
        for user in list(backward.users):
            assert user.target is operator.getitem, "the op returns a tuple"
            user.replace_all_uses_with(results[user.args[1]])
        old += backward.users
    settle(list(scaled.made.values()))  # a wgrad may stand before the dgrad, or after it
    prune(old)


def _at_hand(z: Node, scope: Scope) -> bool:
    """Is the product ``z`` in memory in the backward pass anyway? Queries and keys are not: what
    attention reads are their rotations."""
    _, users = readers(z, lambda u: renames(u) or u.target is aten.permute.default)
    return any(user not in scope.forward for user in users)


class _Scaled:
    """What is read of dz in place of it, put in once for each dz."""

    def __init__(self, graph: Graph, norm: Deferred):
        self.graph, self.norm, self.wide = graph, norm, fake(norm.flat).dtype
        self.made: dict[Node, Node] = {}
        self.sums: dict[Node, tuple[Node, Node | None]] = {}

    def __call__(self, dz: Node, reader: Node) -> Node:
        """``dz * rstd``."""
        if (key := base(dz)) not in self.made:
            put = Put(self.graph, like=reader)
            with self.graph.inserting_before(reader):
                zs = put.mul(put.cast(dz, self.wide), self.norm.flat)
                self.made[key] = put.cast(zs, fake(dz).dtype)
        return self.made[key]

    def columns(self, dz: Node, put: Put) -> tuple[Node, Node | None]:
        """colsum(m * zs) and colsum(dz), each (N,); the second only for a norm with a bias."""
        if (key := base(dz)) not in self.sums:
            centered = put.mul(put.cast(self.made[key], self.wide), self.norm.center)
            first, second = put.column_sum(centered), None
            if self.norm.beta is not None:
                second = put.column_sum(put.cast(dz, self.wide))
            self.sums[key] = first, second
        return self.sums[key]


def _weight_gradient(
    put: Put, wgrad: Node, n_is_left: bool, norm: Deferred, scaled: _Scaled
) -> None:
    """``n.T @ dz``, or where n is on the right ``dz.T @ n``: of h and zs, and for LayerNorm two
    terms of rank one."""
    dz = wgrad.args[1] if n_is_left else wgrad.args[0].args[0]
    zs, sums = scaled(dz, wgrad), None
    with put.graph.inserting_before(wgrad):
        if norm.center is not None:
            sums = scaled.columns(dz, put)
        left, right = (norm.h, zs) if n_is_left else (zs, norm.h)
        wgrad.args = (put.transpose(left), right)
    if sums is None:
        return
    wgrad.meta[OPTIONAL] = True
    users, across = list(wgrad.users), [1, -1] if n_is_left else [-1, 1]

    def rank_one(vector: Node | None, columns: Node) -> Node:
        term = put.reshape(columns, across)
        if vector is None:
            return term
        return put.mul(term, put.reshape(put.cast(vector, scaled.wide), across[::-1]))

    with put.graph.inserting_before(wgrad.next):
        total = put.sub(put.cast(wgrad, scaled.wide), rank_one(norm.gamma, sums[0]))
        if sums[1] is not None:
            total = put.add(total, rank_one(norm.beta, sums[1]))
        total = put.cast(total, fake(wgrad).dtype)
    for user in users:
        user.replace_input_with(wgrad, total)


def _gradients(
    graph: Graph, backward: Node, norm: Deferred, early: bool, products: list[Product] | None
) -> dict[int, Node]:
    """The new results of ``backward``, by their index. Only they count as the pattern: the scale
    and the row sums may end up in an epilogue while these do not. ``early``: the row scale is in
    the dz already."""
    name = "rms_norm_backward" if norm.mean is None else "layer_norm_backward"
    put = Put(graph, like=backward, pattern=(name, backward.name))
    s, x, gamma = backward.args[:3]
    needs = backward.args[-1]
    wide, d = fake(norm.rstd).dtype, fake(x).shape[-1]
    s, centered = put.cast(s, wide), put.cast(x, wide)
    if not early:
        s = put.mul(s, norm.rstd)
    if norm.mean is not None:
        centered = put.sub(centered, norm.mean)
    results: dict[int, Node] = {}
    if needs[0]:
        p = s if gamma is None else put.mul(s, put.cast(gamma, wide))
        first, second = _row_sums(Put(graph, like=backward), p, centered, norm, products)
        slope = put.mul(put.mul(put.mul(norm.rstd, norm.rstd), second), -1.0 / d)
        level = None if first is None else put.mul(put.mul(norm.rstd, first), -1.0 / d)
        dx = put.add(p, put.mul(centered, slope))
        dx = dx if level is None else put.add(dx, level)
        results[0] = put.cast(dx, fake(x).dtype)
    if needs[1]:
        results[1] = put.cast(put.column_sum(put.mul(s, centered)), fake(gamma).dtype)
    if norm.mean is not None and needs[2]:
        dn = put.mul(s, put(aten.reciprocal.default, norm.rstd))
        results[2] = put.cast(put.column_sum(dn), fake(norm.beta).dtype)
    return results


def _row_sums(
    put: Put, p: Node, centered: Node, norm: Deferred, products: list[Product] | None
) -> tuple[Node | None, Node]:
    """rowsum(dn * gamma), None for RMSNorm, and rowsum(dn * gamma * nh), shaped like rstd: from the
    products where they are known, else from p = rstd dn * gamma."""
    if products is None:
        if norm.mean is None:
            return None, put.row_sum(put.mul(p, centered))
        ratio = put(aten.reciprocal.default, norm.rstd)
        return put.mul(put.row_sum(p), ratio), put.row_sum(put.mul(p, centered))
    wide, sizes = fake(p).dtype, put.sizes(norm.rstd)
    firsts, seconds = [], []
    for product in products:
        dz, z = put.cast(product.dz, wide), put.cast(product.z, wide)
        if product.shift is not None:
            if product.shift.added is not None:
                z = put.sub(z, product.shift.added)
            firsts.append(put.mul(dz, product.shift.colsum))
        seconds.append(put.mul(dz, z))
    first = put.reshape(_add_rows(put, firsts), sizes) if firsts else None
    return first, put.reshape(_add_rows(put, seconds), sizes)


def _add_rows(put: Put, matrices: list[Node]) -> Node:
    """The sum over all columns of all ``matrices``, (M, 1). Those of one width are added first: one
    reduction each."""
    widths: dict[int, Node] = {}
    for matrix in matrices:
        n = fake(matrix).shape[-1]
        widths[n] = put.add(widths[n], matrix) if n in widths else matrix
    total, *others = map(put.row_sum, widths.values())
    for other in others:
        total = put.add(total, other)
    return total
