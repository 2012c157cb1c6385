# SPDX-License-Identifier: Apache-2.0
"""GEMMs of an aten graph: their operands, their sums, and the GEMM that computes a tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import scaled_mm as aten_scaled_mm
from coda_inductor.graph.nodes import arguments, aten, fake, is_cast, renames
from coda_inductor.graph.sizes import hint, same
from coda_inductor.graph.walk import sources
from coda_inductor.refusal import Refusal
from coda_inductor.semantic.experts import group_rows, grouped_mm
from coda_inductor.semantic.fp8 import scaled_mm

#: A scaled product of two FP8 matrices is one whose epilogue begins with its scales.
DENSE = (aten.mm.default, aten.addmm.default, scaled_mm)
#: These, and grouped GEMMs, in which each row has the B of its group.
GEMMS = (*DENSE, grouped_mm)
#: The products in a traced graph, before a pass raises scaled ones.
TRACED = (*GEMMS, aten_scaled_mm)

#: The names of A and B in schemas.
_FACTORS = {
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten_scaled_mm), ("input", "mat2")),
    **dict.fromkeys((scaled_mm, grouped_mm), ("a", "b")),
    aten.addmm.default: ("mat1", "mat2"),
}

#: Meta key of a scaled product that computes a weight gradient; its factors do not show that.
WEIGHT_GRADIENT = "coda_weight_gradient"

#: Low rank: K is at most this, so that the stores take longer than the multiplications, and M and N
#: are at least this many times K, so that other products of the graph are larger.
LOW_RANK, LOW_RANK_RATIO = 256, 8

#: Maps a GEMM node to the reason why its epilogue cannot or should not be fused, or None.
Legal = Callable[[Node], Refusal | None]


def gemm_inputs(gemm: Node) -> tuple[Node, Node]:
    """(A, B) of a GEMM's node. For a grouped GEMM, B is (E, K, N), and rows may be gathered from A:
    M and N are the sizes of the node itself."""
    args = arguments(gemm)
    left, right = _FACTORS[gemm.target]
    return args[left], args[right]


def low_rank(gemm: Node) -> bool:
    """Is K of ``gemm`` so small that stores take longer than multiplications?"""
    m, n = (hint(size) for size in fake(gemm).shape[-2:])
    k = hint(fake(gemm_inputs(gemm)[0]).shape[-1])
    return k <= LOW_RANK and LOW_RANK_RATIO * k <= min(m, n)


def routes_of(gemm: Node) -> tuple[Node | None, Node | None]:
    """The group offsets and the row index of a grouped product; None for a missing one."""
    if gemm.target is not grouped_mm:
        return None, None
    args = arguments(gemm)
    return args["offsets"], args["rows"]


def group_bias(x: Node, gemm: Node, n: int) -> Node | None:
    """The (E, ``n``) tensor whose row e ``x`` repeats for group e of ``gemm``, or None."""
    if x.target is not group_rows or arguments(x)["offsets"] is not routes_of(gemm)[0]:
        return None
    bias, b = fake(arguments(x)["x"]), fake(gemm_inputs(gemm)[1])
    fits = same(bias.shape, (b.shape[0], n))
    return arguments(x)["x"] if fits else None


def scales_of(gemm: Node) -> tuple[Node, ...]:
    """The factors of the rows and the columns of a scaled product; empty for others."""
    if gemm.target is not scaled_mm:
        return ()
    args = arguments(gemm)
    return args["inv_a"], args["inv_b"]


def fast_accumulation(gemm: Node) -> bool:
    """May ``gemm`` sum over K with fewer bits than float32? Only scaled products can."""
    return gemm.target is scaled_mm and bool(arguments(gemm)["fast"])


def bias_of(gemm: Node) -> Node | None:
    """The tensor that a GEMM adds to its product, of any shape; None if it adds nothing."""
    name = {scaled_mm: "bias", aten.addmm.default: "input"}.get(gemm.target)
    return None if name is None else arguments(gemm)[name]


def plain_bias(gemm: Node) -> bool:
    """Does ``gemm`` add one value per column, without a factor?"""
    bias = bias_of(gemm)
    return bias is not None and unscaled(gemm) and fake(bias).dim() == 1


def unscaled(gemm: Node) -> bool:
    """Does ``gemm`` scale neither its product nor its addend by a number?"""
    args = arguments(gemm)
    return args.get("alpha", 1) == args.get("beta", 1) == 1


def addends(node: Any) -> list[Node]:
    """The two tensors of one shape that ``node`` adds, without broadcasting; empty for others."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor:
        return []
    args = arguments(node)
    pair = [args["input"], args["other"]]
    plain = args["alpha"] == 1 and pair[0] is not pair[1]
    if not plain or not all(isinstance(fake(x), torch.Tensor) for x in pair):
        return []
    return pair if all(same(fake(x).numel(), fake(node).numel()) for x in pair) else []


def terms(node: Node) -> list[Node] | None:
    """The products that ``node`` adds up; None if it is not a plain sum (or a single product), or
    if its terms have other readers. ``node`` itself may have any readers."""
    products: list[Node] = []
    todo = [node]
    while todo:
        top = todo.pop()
        if top is not node and len(top.users) != 1:
            return None
        if top.target in (aten.mm.default, grouped_mm):
            products.append(top)
        elif renames(top) or (is_cast(top) and fake(top).dtype != torch.float64):
            todo.append(top.all_input_nodes[0])
        elif parts := addends(top):
            todo += parts
        else:
            return None
    return products


def producer(x: Node) -> Node | None:
    """The last GEMM whose tile ``x`` is computed from, element by element; or None. A product that
    is broadcast to ``x``, as a gate of one value a row, is an operand."""
    gemms = (node for node in sources(x) if node.target in GEMMS)
    return next((g for g in gemms if same(fake(g).numel(), fake(x).numel())), None)
