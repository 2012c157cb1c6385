# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a deferred RMSNorm, after the GEMMs that make its gradient (R3, R4).

Before (the rows of x are M, its width is d; one z = n @ W, dz its gradient, for every GEMM)::

    dn = sum of dz @ W.T over the GEMMs;  dx, dgamma = rms_norm_backward(dn, x, gamma, rstd)
    dW = n.T @ dz

After, where every dz is made in the epilogue of a GEMM (through SwiGLU)::

    zs = dz * rstd                            (where dz is made)
    dot = sum of rowsum(dz * z) over the GEMMs     (where dz is made)
    s = sum of zs @ W.T                       one GEMM or several, its epilogue:
    dx = s * gamma - (rstd**2 / d) * dot * x       (and the residual's gradient, by fusion)
    dgamma = colsum(s * x)                         (partials)
    dW = h.T @ zs                             h = x * gamma, as the forward pass stored it

and elsewhere (attention makes dz, or the caller)::

    s = (sum of dz @ W.T) * rstd;  dot = rowsum(s * gamma * x);  zs only for dW

Why it is valid: s = rstd * dn, for a row scale commutes with the product (R1). With
n = x rstd gamma, ``rms_norm_backward`` says dx = rstd gamma dn - x rstd**2 / d * rowsum(dn * n),
and rowsum(dn * n) = rowsum((dz @ W.T) * n) = rowsum(dz * (n @ W)) = rowsum(dz * z) (R3).
n.T @ dz = (D_rstd h).T @ dz = h.T @ (D_rstd dz) (R4).

Rounding: zs is rounded to 16 bits, and so is z, which the dot is taken from. Where W has a singular
value much larger than the others and dz hardly any of its direction, that error is all there is in
dx: 40 times eager's at 1000 times the others, if dz itself was exact. Where a GEMM makes dz, eager
rounds the GEMM's result and dz, an error of the same size, and ours takes its place. Elsewhere dz
is in memory already, and is read as it is.

The dot is also taken as rowsum(s * gamma * x), the same number by the definition of s, where z is
not at hand (a bias hides it, a weight is shared by two GEMMs, nothing else would keep it until
then). It is then known only after the GEMM, and a kernel of Inductor's finishes dx.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune, settle
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import ALIASES, aten, fake
from coda_inductor.rewrite.norm.uses import Uses


@dataclass(frozen=True)
class Scales:
    """What took the place of a norm: the un-normalized operand ``h`` (M, d) of its GEMMs, and its
    row scale as ``rstd`` (..., 1) and as ``flat`` (M, 1)."""

    h: Node
    rstd: Node
    flat: Node


def differentiate(
    graph: Graph,
    found: Uses,
    scales: Scales,
    products: list[tuple[Node, Node]] | None,
) -> None:
    """Rewrite the backward pass of a norm whose forward pass has been rewritten already.

    ``products`` are pairs (z, dz), each (M, N), of the GEMMs behind it, if they are known.
    """
    scaled = Scaled(graph, scales.flat)
    old = [n for gemm in (*found.wgrads, *found.dgrads) for n in gemm.all_input_nodes]
    for wgrad, n_is_left in found.wgrads.items():
        put = Put(graph, like=wgrad)
        with graph.inserting_before(wgrad):
            if n_is_left:
                turned = put(aten.permute.default, scales.h, [1, 0])
                wgrad.args = (turned, scaled(wgrad.args[1], wgrad))
            else:
                dz = scaled(wgrad.args[0].args[0], wgrad)
                wgrad.args = (put(aten.permute.default, dz, [1, 0]), scales.h)
    early = made_by_gemms(found.dgrads)
    for dgrad in found.dgrads if early else ():
        dz, weight = dgrad.args
        dgrad.args = (scaled(dz, dgrad), weight)
    if found.backward is not None:
        with graph.inserting_before(found.backward):
            _apply(graph, found.backward, scales, early, products if early else None)
        old += found.backward.all_input_nodes
        graph.erase_node(found.backward)
    settle(list(scaled.made.values()))  # a wgrad may stand in front of the dgrad, or behind it
    prune(old)


class Scaled:
    """dz -> dz * rstd, put in once for each dz."""

    def __init__(self, graph: Graph, flat: Node):
        self.graph, self.flat = graph, flat
        self.made: dict[Node, Node] = {}

    def __call__(self, dz: Node, reader: Node) -> Node:
        base = dz
        while base.target in ALIASES:
            base = base.args[0]
        if base not in self.made:
            put = Put(self.graph, like=reader)
            with self.graph.inserting_before(reader):
                wide = put.cast(dz, fake(self.flat).dtype)
                self.made[base] = put.cast(put(aten.mul.Tensor, wide, self.flat), fake(dz).dtype)
        return self.made[base]


def made_by_gemms(dgrads: list[Node]) -> bool:
    """Is the dz of each of ``dgrads`` computed on a GEMM's tile, so that eager rounds it too?"""
    return all(producer(dgrad.args[0]) is not None for dgrad in dgrads)


def _apply(
    graph: Graph,
    backward: Node,
    scales: Scales,
    early: bool,
    products: list[tuple[Node, Node]] | None,
) -> None:
    """Put the new gradients in the place of ``backward``'s results. Only they count as the pattern:
    the scale and the dot may end up in an epilogue while these do not. ``early`` says that the row
    scale is in the dz already."""
    put = Put(graph, like=backward, pattern=("rms_norm_backward", backward.name))
    s, x, weight, _, (need_dx, need_dweight) = backward.args
    wide, d = fake(scales.rstd).dtype, fake(x).shape[-1]
    sw, xw = put.cast(s, wide), put.cast(x, wide)
    if not early:
        sw = put(aten.mul.Tensor, sw, scales.rstd)
    results: dict[Any, Node] = {}
    if need_dx:
        p = sw if weight is None else put(aten.mul.Tensor, sw, put.cast(weight, wide))
        if products is None:
            dot = put(aten.sum.dim_IntList, put(aten.mul.Tensor, p, xw), [-1], True)
        else:
            dot = put(
                aten.reshape.default,
                _dot(products, wide, Put(graph, like=backward)),
                put.sizes(scales.rstd),
            )
        square = put(aten.mul.Tensor, scales.rstd, scales.rstd)
        c = put(aten.mul.Tensor, put(aten.mul.Tensor, square, dot), -1.0 / d)
        dx = put(aten.add.Tensor, p, put(aten.mul.Tensor, xw, c))
        results[0] = put.cast(dx, fake(x).dtype)
    if need_dweight:
        rows = list(range(fake(x).dim() - 1))
        dweight = put(aten.sum.dim_IntList, put(aten.mul.Tensor, sw, xw), rows)
        results[1] = put.cast(dweight, fake(weight).dtype)
    for user in list(backward.users):
        assert user.target is operator.getitem, "the op returns a tuple"
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)


def _dot(products: list[tuple[Node, Node]], wide: torch.dtype, put: Put) -> Node:
    """Sum of rowsum(dz * z), (M, 1)."""
    return add_rows(
        put, [put(aten.mul.Tensor, put.cast(dz, wide), put.cast(z, wide)) for z, dz in products]
    )


def add_rows(put: Put, matrices: list[Node]) -> Node:
    """The sum over all columns of all ``matrices``, (M, 1). Those of one width are added first: one
    reduction each."""
    widths: dict[Any, Node] = {}
    for matrix in matrices:
        n = fake(matrix).shape[-1]
        widths[n] = put(aten.add.Tensor, widths[n], matrix) if n in widths else matrix
    sums = [put(aten.sum.dim_IntList, matrix, [-1], True) for matrix in widths.values()]
    total = sums[0]
    for other in sums[1:]:
        total = put(aten.add.Tensor, total, other)
    return total
