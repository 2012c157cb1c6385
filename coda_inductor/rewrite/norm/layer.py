# SPDX-License-Identifier: Apache-2.0
"""LayerNorm between GEMMs, rule R5: both statistics move past the GEMMs behind, as a row scale and
a rank-one term; their sums leave the GEMM in front.

Before::

    x = x0 + y @ Wo;  n, mean, rstd = layer_norm(x, gamma, beta, eps);  z = n @ W + b

After::

    x = x0 + y @ Wo;  v = x - pivot;  h = v * gamma
    m = mean(v);  rstd = rsqrt(mean(v * v) - m**2 + eps);  mean = m + pivot
    z = (h @ W - m * (gamma^T W)) * rstd + (beta^T W + b)

Why it is valid: n = D_rstd (v - m 1^T) diag(gamma) + 1 beta^T, multiplied out; LayerNorm does not
change when a row is shifted, so any ``pivot``, one value a row, will do. gamma^T W and
beta^T W are computed at every call, for W is what training changes; a kernel of Inductor's reads W
once for both, which ``gate.norm_loses`` charges.

Rounding: v should be small, so the pivot is the mean of the residual stream x0 that x was made from
by adding terms; the LayerNorm that read x0 has computed it. What is left in v is bounded by x0's
deviation and the terms t: rounding h to 16 bits costs at most u (|x0 - pivot| + sum |t|), u being
the unit roundoff. Eager rounds the terms themselves, u |t| each, and n, u |n|: the same bound. What
cancels after that (h @ W - m colsum, mean(v * v) - m**2) does so in float32, at a relative error of
about 2**-22 (1 + m**2 / var), which is less as long as the terms are in bfloat16, and has a floor
where it is not (``_variance``). Hence the refusals:

- no pivot: v would round at the size of the mean;
- a term that eager keeps in float32: nothing bounds what rounding v costs;
- a float32 product: it cancels at the precision of everything else (4.7e-2 where Inductor has 7e-5,
  at a mean of 1000 deviations), and there is no kernel to gain by it. Float64 stays, for proofs;
- a product that is rounded before the epilogue, as plain ops do on a CPU: it cancels in 16 bits.
"""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, insert, prune
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import aten, fake, source
from coda_inductor.graph.sides import checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.program.dtypes import HALF
from coda_inductor.rewrite.norm.consumers import KEEP, Shift, scale, wide_of
from coda_inductor.rewrite.norm.layer_backward import Product, Statistics, differentiate
from coda_inductor.rewrite.norm.uses import Uses


class Means:
    """The row means that LayerNorms have computed so far, by the tensor that they are of."""

    def __init__(self) -> None:
        self.known: dict[Node, Node] = {}

    def note(self, norm: Node, mean: Node | None = None) -> None:
        """Remember the mean of the input of ``norm``: ``mean`` (..., 1), or where the norm stays,
        its own output."""
        if mean is None:
            mean = next((u for u in norm.users if u.args[1] == 1), None)
        if mean is None:
            with norm.graph.inserting_after(norm):
                mean = insert(norm.graph, operator.getitem, (norm, 1), like=norm)
        self.known[source(norm.args[0])] = mean

    def pivot(self, norm: Node) -> tuple[Node, list[Node]] | None:
        """The mean of a tensor that the norm's input was made from by adding terms, and these."""
        todo: list[tuple[Node, list[Node]]] = [(source(norm.args[0]), [])]
        seen = set()
        while todo:
            node, terms = todo.pop()
            mean = self.known.get(node)
            if mean is not None and _fits(mean, norm):
                return mean, terms
            if node not in seen and node.target is aten.add.Tensor:
                seen.add(node)
                parts = [source(n) for n in node.all_input_nodes]
                todo += [(part, [*terms, *(p for p in parts if p is not part)]) for part in parts]
        return None


def refusal(norm: Node, found: Uses, means: Means, *, rounded: bool = False) -> str | None:
    """Why a LayerNorm whose readers are ``found`` must not wait, or None; ``rounded`` says that
    their products are rounded before what is taken away from them."""
    if found.dtype == torch.float32:
        return (
            "float32: where a row's mean is large against its deviation, the deferred product "
            "would lose digits, and float32 GEMMs have no kernel"
        )
    if rounded and found.dtype in HALF:
        return (
            "plain ops round its product before the mean is taken away from it "
            "(options['reference'] does not, as kernels do not)"
        )
    pivot = means.pivot(norm)
    if pivot is None:
        return (
            "no LayerNorm in front of it has computed the mean of a tensor that its input is made "
            "from: its operand would round at the size of the mean"
        )
    wide = [t for t in pivot[1] if fake(t).dtype not in HALF]
    if wide and found.dtype != torch.float64:
        return (
            f"{wide[0].name}, a {fake(wide[0]).dtype} value, is added to the tensor whose mean is "
            "known: its operand would round at the size of that value"
        )
    return None


def defer_layer_norm(graph: Graph, norm: Node, found: Uses, means: Means) -> None:
    """Apply the rewrite to a ``layer_norm`` node that has a pivot and whose readers are ``found``,
    and to its gradient."""
    x, gamma, _, eps, _ = norm.args
    wide, pattern = wide_of(x), ("layer_norm", norm.name)
    known_mean = means.pivot(norm)
    assert known_mean is not None, "asked before"
    pivot, _ = known_mean
    put = Put(graph, like=norm, pattern=pattern)
    with graph.inserting_before(norm):
        if not same(fake(pivot).shape[:-1], fake(x).shape[:-1]):
            pivot = put(aten.reshape.default, pivot, [*put.sizes(x)[:-1], 1])
        v = put(aten.sub.Tensor, put.cast(x, wide), pivot)
        m = put(aten.mean.dim, v, [-1], True)
        rstd = put(aten.rsqrt.default, put(aten.add.Tensor, _variance(put, v, m, found.dtype), eps))
        h = v if gamma is None else put(aten.mul.Tensor, v, put.cast(gamma, wide))
        h = put.cast(h, found.dtype)
        h.meta[KEEP] = True
        h = put(aten.reshape.default, h, [-1, fake(x).shape[-1]])
        mean = put(aten.add.Tensor, m, pivot)
        flat = put(aten.reshape.default, rstd, [-1, 1])
        center = put(aten.reshape.default, m, [-1, 1])
    means.note(norm, mean)
    gradients = found.products(biased=True)
    known: list[Product] | None = None if gradients is None else []
    for gemm in found.gemms:
        shift = _shift(graph, gemm, norm, center)
        bias = gemm.args[0] if gemm.target is aten.addmm.default else None
        z = scale(graph, gemm, h, flat, pattern=pattern, shift=shift)
        if known is not None and gradients is not None and gemm in gradients:
            known.append(Product(z, gradients[gemm], shift, bias))
    differentiate(graph, norm, found, Statistics(h, mean, rstd, center, flat), known)
    prune(list(norm.users))


def _fits(mean: Node, norm: Node) -> bool:
    """May ``mean`` be read where ``norm`` stands? In one checkpoint, and of as many rows."""
    rows = math.prod(fake(norm.args[0]).shape[:-1])  # Size.numel() would make a size a number
    return checkpoint(mean) == checkpoint(norm) and same(fake(mean).numel(), rows)


def _variance(put: Put, x: Node, mean: Node, dtype: torch.dtype) -> Node:
    """The biased variance of each row of x, whose mean is small, by its second moment: the partial
    sums of one pass make both.

    At least what rounding the row to ``dtype`` at its mean would add to it, a twelfth of the square
    of the spacing there: eager's variance has that. Less is what is left of float32 sums that
    cancel, and may be nothing or negative.
    """
    moment = put(aten.mean.dim, put(aten.mul.Tensor, x, x), [-1], True)
    square = put(aten.mul.Tensor, mean, mean)
    variance = put(aten.sub.Tensor, moment, square)
    least = put(aten.mul.Tensor, square, torch.finfo(dtype).eps ** 2 / 12)
    return put(aten.maximum.default, variance, least)


def _shift(graph: Graph, gemm: Node, norm: Node, center: Node) -> Shift:
    """``center`` (M, 1) with gamma^T W and beta^T W, each (N,)."""
    _, gamma, beta, _, _ = norm.args
    weight, wide = gemm_inputs(gemm)[1], fake(center).dtype
    put = Put(graph, like=gemm)
    with graph.inserting_before(gemm):
        w = put.cast(weight, wide)

        def times(vector: Node | None) -> Node:
            if vector is None:
                return put(aten.sum.dim_IntList, w, [0])
            column = put(aten.reshape.default, put.cast(vector, wide), [-1, 1])
            return put(aten.sum.dim_IntList, put(aten.mul.Tensor, w, column), [0])

        return Shift(center, times(gamma), None if beta is None else times(beta))
