# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a deferred LayerNorm: what ``norms_backward`` is for RMSNorm.

Before (x is M x d; one z = n @ W + b, dz its gradient, for every GEMM)::

    dn = sum of dz @ W.T;  dx, dgamma, dbeta = layer_norm_backward(dn, x, gamma, beta, mean, rstd)
    dW = n.T @ dz

After::

    zs = dz * rstd       (where dz is made; as in norms_backward, for dW only if no GEMM makes it)
    first  = sum of rowsum(dz * (gamma^T W))              (where dz is made)
    second = sum of rowsum(dz * (z - beta^T W - b))       (where dz is made)
    s = sum of zs @ W.T                                   one GEMM or several, its epilogue:
    dx = s * gamma - (rstd**2 / d) * second * (x - mean) - (rstd / d) * first
    dgamma = colsum(s * (x - mean));  dbeta = colsum(s / rstd)               (partials)
    dW = h.T @ zs - gamma colsum(mean * zs)^T + beta colsum(dz)^T            h = x * gamma

Why it is valid: with nh = (x - mean) rstd and p = dn gamma, ``layer_norm_backward`` says
dx = rstd (p - rowmean(p) - nh rowmean(p nh)). s = rstd dn (R1). rowsum(p) = rowsum((dz W^T) gamma)
= rowsum(dz (gamma^T W)) and rowsum(p nh) = rowsum((dz W^T)(n - beta)) = rowsum(dz ((n - beta) W))
(R3), n W being z without its bias. n = D_rstd h - (rstd mean) gamma^T + 1 beta^T, transposed and
multiplied with dz, is dW (R4).

Where z is not at hand, or no GEMM makes dz, the two sums are those of s * gamma and
s * gamma * (x - mean), known only after the GEMM.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune, settle
from coda_inductor.graph.gemms import OPTIONAL
from coda_inductor.graph.nodes import ALIASES, aten, fake
from coda_inductor.rewrite.norm.consumers import Shift
from coda_inductor.rewrite.norm.rms_backward import Scaled, add_rows, made_by_gemms
from coda_inductor.rewrite.norm.uses import Uses


@dataclass(frozen=True)
class Product:
    """A GEMM behind the norm: its result ``z`` (M, N), the gradient ``dz`` of it, what beside the
    row scale is behind it, and its own bias (N,), if any."""

    z: Node
    dz: Node
    shift: Shift
    bias: Node | None


@dataclass(frozen=True)
class Statistics:
    """What took the place of a norm: the operand ``h`` (M, d) of its GEMMs, and its statistics as
    ``mean`` and ``rstd`` (..., 1) and as ``center`` and ``flat`` (M, 1)."""

    h: Node
    mean: Node
    rstd: Node
    center: Node
    flat: Node


def differentiate(
    graph: Graph, norm: Node, found: Uses, stats: Statistics, products: list[Product] | None
) -> None:
    """Rewrite the backward pass of ``norm`` whose forward pass has been rewritten already.

    ``products`` are the GEMMs behind it, None where they cannot be told apart.
    """
    scaled = Scaled(graph, stats.flat)
    correct = _Correction(graph, norm, stats, scaled)
    old = [n for gemm in (*found.wgrads, *found.dgrads) for n in gemm.all_input_nodes]
    for wgrad, n_is_left in found.wgrads.items():
        correct(wgrad, n_is_left)
    early = made_by_gemms(found.dgrads)
    for dgrad in found.dgrads if early else ():
        dz, weight = dgrad.args
        dgrad.args = (scaled(dz, dgrad), weight)
    if found.backward is not None:
        with graph.inserting_before(found.backward):
            _apply(graph, found.backward, stats, early, products if early else None)
        old += found.backward.all_input_nodes
        graph.erase_node(found.backward)
    settle(list(scaled.made.values()))  # a wgrad may stand in front of the dgrad, or behind it
    prune(old)


class _Correction:
    """dW = n.T @ dz becomes h.T @ zs and two terms of rank one."""

    def __init__(self, graph: Graph, norm: Node, stats: Statistics, scaled: Scaled):
        self.graph, self.stats, self.scaled = graph, stats, scaled
        _, self.gamma, self.beta, _, _ = norm.args
        self.rows: dict[Node, tuple[Node, Node | None]] = {}

    def __call__(self, wgrad: Node, n_is_left: bool) -> None:
        put, wide = Put(self.graph, like=wgrad), fake(self.stats.flat).dtype
        with self.graph.inserting_before(wgrad):
            dz = wgrad.args[1] if n_is_left else wgrad.args[0].args[0]
            zs = self.scaled(dz, wgrad)
            first, second = self._sums(put, dz, zs)
            if n_is_left:
                turned = put(aten.permute.default, self.stats.h, [1, 0])
                product = put(aten.mm.default, turned, zs)
            else:
                turned = put(aten.permute.default, zs, [1, 0])
                product = put(aten.mm.default, turned, self.stats.h)
            product.meta[OPTIONAL] = True
            # (d, N), or (N, d) where n is on the right
            across = [1, -1] if n_is_left else [-1, 1]
            along = [-1, 1] if n_is_left else [1, -1]
            term = put(aten.reshape.default, first, across)
            if self.gamma is not None:
                gamma = put(aten.reshape.default, put.cast(self.gamma, wide), along)
                term = put(aten.mul.Tensor, term, gamma)
            total = put(aten.sub.Tensor, put.cast(product, wide), term)
            if second is not None:
                beta = put(aten.reshape.default, put.cast(self.beta, wide), along)
                term = put(aten.mul.Tensor, put(aten.reshape.default, second, across), beta)
                total = put(aten.add.Tensor, total, term)
            total = put.cast(total, fake(wgrad).dtype)
        wgrad.replace_all_uses_with(total)
        self.graph.erase_node(wgrad)

    def _sums(self, put: Put, dz: Node, zs: Node) -> tuple[Node, Node | None]:
        """colsum(mean * zs) and colsum(dz), each (N,); the second only for a norm with a bias."""
        base = dz
        while base.target in ALIASES:
            base = base.args[0]
        if base not in self.rows:
            wide = fake(self.stats.flat).dtype
            centered = put(aten.mul.Tensor, put.cast(zs, wide), self.stats.center)
            first = put(aten.sum.dim_IntList, centered, [0])
            second = None
            if self.beta is not None:
                second = put(aten.sum.dim_IntList, put.cast(dz, wide), [0])
            self.rows[base] = first, second
        return self.rows[base]


def _apply(
    graph: Graph, backward: Node, stats: Statistics, early: bool, products: list[Product] | None
) -> None:
    """Put the new gradients in the place of ``backward``'s results. ``early`` says that the row
    scale is in the dz already."""
    put = Put(graph, like=backward, pattern=("layer_norm_backward", backward.name))
    s, x, gamma, beta, _, _, needs = backward.args
    wide, d = fake(stats.rstd).dtype, fake(x).shape[-1]
    sw = put.cast(s, wide)
    if not early:
        sw = put(aten.mul.Tensor, sw, stats.rstd)
    centered = put(aten.sub.Tensor, put.cast(x, wide), stats.mean)
    results: dict[int, Node] = {}
    if needs[0]:
        p = sw if gamma is None else put(aten.mul.Tensor, sw, put.cast(gamma, wide))
        first, second = _row_sums(Put(graph, like=backward), p, centered, stats, products)
        square = put(aten.mul.Tensor, stats.rstd, stats.rstd)
        slope = put(aten.mul.Tensor, put(aten.mul.Tensor, square, second), -1.0 / d)
        level = put(aten.mul.Tensor, put(aten.mul.Tensor, stats.rstd, first), -1.0 / d)
        dx = put(aten.add.Tensor, p, put(aten.mul.Tensor, centered, slope))
        results[0] = put.cast(put(aten.add.Tensor, dx, level), fake(x).dtype)
    rows = list(range(fake(x).dim() - 1))
    if needs[1]:
        dgamma = put(aten.sum.dim_IntList, put(aten.mul.Tensor, sw, centered), rows)
        results[1] = put.cast(dgamma, fake(gamma).dtype)
    if needs[2]:
        dn = put(aten.mul.Tensor, sw, put(aten.reciprocal.default, stats.rstd))
        dbeta = put(aten.sum.dim_IntList, dn, rows)
        results[2] = put.cast(dbeta, fake(beta).dtype)
    for user in list(backward.users):
        assert user.target is operator.getitem, "the op returns a tuple"
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)


def _row_sums(
    put: Put, p: Node, centered: Node, stats: Statistics, products: list[Product] | None
) -> tuple[Node, Node]:
    """rowsum(dn * gamma) and rowsum(dn * gamma * nh), shaped like rstd: from the products where
    they are known, else from p = rstd dn * gamma."""
    if products is None:
        ratio = put(aten.reciprocal.default, stats.rstd)
        first = put(aten.mul.Tensor, put(aten.sum.dim_IntList, p, [-1], True), ratio)
        return first, put(aten.sum.dim_IntList, put(aten.mul.Tensor, p, centered), [-1], True)
    firsts, seconds = [], []
    for product in products:
        dz, z = put.cast(product.dz, fake(p).dtype), put.cast(product.z, fake(p).dtype)
        # One vector, for each takes registers of the epilogue that reads it.
        added = [v for v in (product.shift.offset, product.bias) if v is not None]
        if added:
            vector = added[0] if len(added) == 1 else put(aten.add.Tensor, *added)
            z = put(aten.sub.Tensor, z, vector)
        firsts.append(put(aten.mul.Tensor, dz, product.shift.colsum))
        seconds.append(put(aten.mul.Tensor, dz, z))
    sizes = put.sizes(stats.rstd)
    return tuple(
        put(aten.reshape.default, total, sizes)
        for total in (add_rows(put, firsts), add_rows(put, seconds))
    )
