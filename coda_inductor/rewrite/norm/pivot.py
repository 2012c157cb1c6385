# SPDX-License-Identifier: Apache-2.0
"""Decides which LayerNorms can wait without losing accuracy: a mean in their input is known.

The operand of the GEMMs is h = v * gamma with v = x - pivot, in 16 bits, so v should be small. The
pivot is the mean of the residual stream x0, and x is x0 plus some terms; the LayerNorm that read x0
has computed it. v is bounded by x0's deviation and the terms t: rounding h costs at most u (|x0 -
pivot| + sum |t|), u being the unit roundoff. Eager rounds the terms themselves, u |t| each, and n,
u |n|: the same bound. Later differences (h @ W - m colsum, mean(v * v) - m**2) cancel in float32,
at a relative error of about 2**-22 (1 + m**2 / var), which is less if the terms are in bfloat16.
Hence the refusals:

- no pivot: v would round at the size of the mean;
- a term that eager keeps in float32: the error of rounding v has no bound;
- a float32 product: it cancels at the precision of all other values (4.7e-2 where Inductor has
  7e-5, at a mean of 1000 deviations), and has no kernel to gain. Float64 stays, for proofs;
- a product that is rounded before the epilogue, as plain ops do on a CPU: it cancels in 16 bits.
"""

import math
import operator

import torch
from torch.fx import Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, aten, fake, is_cast, label
from coda_inductor.graph.sides import checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import parts, source
from coda_inductor.program.dtypes import HALF
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.norms import NORMS


class Means:
    """The row means that LayerNorms have computed so far, by the tensor that was averaged."""

    def __init__(self) -> None:
        self.means: dict[Node, Node] = {}

    def add(self, x: Node, mean: Node) -> None:
        """Remember ``mean`` (..., 1), the mean of ``x``."""
        self.means[source(x)] = mean

    def stays(self, norm: Node) -> None:
        """Remember the mean that ``norm``, which stays, returns beside its result, if it does."""
        index = NORMS[norm.target].mean
        if index is None:
            return
        mean = parts(norm).get(index)
        if mean is None:
            mean = Put(norm, norm.next)(operator.getitem, norm, index)
        self.add(arguments(norm)["x"], mean)

    def find(self, norm: Node) -> tuple[Node, list[Node]] | None:
        """(mean, terms) if the norm's input is a tensor with a known mean plus terms; else None."""
        todo: list[tuple[Node, list[Node]]] = [(source(arguments(norm)["x"]), [])]
        visited = set()
        while todo:
            node, terms = todo.pop()
            mean = self.means.get(node)
            if mean is not None and _fits(mean, norm):
                return mean, terms
            if node in visited:
                continue
            visited.add(node)
            if is_cast(node):  # to fewer bits: source() looks through all others
                todo.append((source(node.all_input_nodes[0]), terms))
            elif node.target is aten.add.Tensor:
                parts = [source(n) for n in node.all_input_nodes]
                todo += [(part, [*terms, *(p for p in parts if p is not part)]) for part in parts]
        return None

    def choose(self, norm: Node, dtype: torch.dtype, rounded: bool) -> Node | Refusal:
        """The pivot of a LayerNorm that GEMMs read in ``dtype``, or why it must not be deferred.
        ``rounded``: are their products rounded before the mean is subtracted?"""
        if dtype == torch.float32:
            return refuse(
                "layer-norm-wide",
                "float32: where a row's mean is large against its deviation, the deferred product "
                "would lose digits, and float32 GEMMs have no kernel",
            )
        if rounded and dtype in HALF:
            return refuse(
                "layer-norm-rounds",
                "plain ops round its product before the mean is taken away from it "
                "(options['reference'] does not, as kernels do not)",
            )
        match = self.find(norm)
        if match is None:
            return refuse(
                "layer-norm-no-mean",
                "no LayerNorm before it has computed the mean of a tensor that its input is "
                "made from: its operand would round at the size of the mean",
            )
        pivot, terms = match
        wide = next((t for t in terms if not _is_rounded(t)), None)
        if wide is not None and dtype != torch.float64:
            return refuse(
                "layer-norm-wide",
                f"{label(wide)}, a {fake(wide).dtype} value, is added to the tensor whose mean is "
                "known: its operand would round at the size of that value",
            )
        return pivot


def _is_rounded(term: Node) -> bool:
    """Does eager round ``term``, or its source if it is a multiple, to 16 bits?"""
    factors = term.all_input_nodes if term.target is aten.mul.Tensor else []
    whole = [source(n) for n in factors if same(fake(n).shape, fake(term).shape)]
    return any(fake(n).dtype in HALF for n in (term, *whole))


def _fits(mean: Node, norm: Node) -> bool:
    """Can ``norm`` read ``mean``? It must be in the same checkpoint and have as many rows."""
    shape = fake(arguments(norm)["x"]).shape
    rows = math.prod(shape[:-1])  # Size.numel() would make a size a number
    return checkpoint(mean) == checkpoint(norm) and same(fake(mean).numel(), rows)
