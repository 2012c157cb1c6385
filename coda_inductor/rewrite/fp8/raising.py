# SPDX-License-Identifier: Apache-2.0
"""torchao's quantizations and scaled products become two semantic ops (``semantic.fp8``).

Before (one Linear, forward; the second product where torchao's rowwise kernel would be slow)::

    m = amax(abs(x)); s = float32(448 / max(float64(m), eps)); q = float8(clamp(x * s)); ... of W
    y = _scaled_mm(q, clone(r.t()), 1 / s, 1 / t, None, None, bfloat16, True)
    y = bfloat16(_scaled_mm(q, r.t(), one, one, None, None, bfloat16) * (1 / s * 1 / t))

After::

    q, i = quantize(x, [1], float8_e4m3fn, True); r, j = quantize(W, [1], ...)
    y = scaled_mm(q, r.t(), i, j.t(), bfloat16, True, after)

Valid because the ops are defined as exactly these chains: decomposed, they give the same bits,
including the copies of factors that ``_scaled_mm`` needs. Equal quantizations become one, also of
different views or transposes of a tensor, if they belong to the same pass (forward, backward, or
recomputed there) and the same checkpoint. A scale that torchao repeats for every column stays one.

Refuses: a cast to FP8 by another chain (a maximum over all ranks; bounds for it; a scale that is an
argument), although its product is still raised; a product with a scale for its result.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import scaled_mm as aten_scaled_mm
from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import WEIGHT_GRADIENT, gemm_inputs
from coda_inductor.graph.nodes import (
    arguments,
    aten,
    constant,
    converts,
    fake,
    is_cast,
    is_transpose,
    label,
    renames,
)
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, chain, only_reader
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.fp8.chains import Chain, chain_of, relaid, single
from coda_inductor.semantic.fp8 import quantize, scaled_mm


def raise_fp8(graph: Graph, record: Record) -> None:
    """Apply the rewrite, in place. Only sequences of torchao's ops are raised and counted."""
    products = [n for n in graph.nodes if n.target in (aten_scaled_mm, scaled_mm)]
    if not products or not record.enabled("fp8_product"):
        return
    factors = _Factors(graph, record)
    for node in products:
        product = _product(node)
        if isinstance(product, Refusal):
            record.refuse("fp8", node, product)
        else:
            _raise(node, product, factors)
            record.fire("fp8_product", node.target is aten_scaled_mm)
    graph.eliminate_dead_code()


def origin(node: Node) -> Any:
    """A key that is equal for nodes with the same elements in the same order: the tensor under
    their views, and the dtypes of casts between."""
    node = base(node)
    if is_cast(node):
        return (origin(node.all_input_nodes[0]), fake(node).dtype)
    return node


@dataclass(frozen=True)
class _Product:
    """A product of ``a`` and ``b``: its last node ``end``; the factors of its ``rows`` and
    ``columns``; are these applied ``after`` it; its ``bias``, if any."""

    a: Node
    b: Node
    end: Node
    rows: Node
    columns: Node
    fast: bool
    after: bool
    bias: Node | None


def _product(node: Node) -> _Product | Refusal:
    args = arguments(node)
    if node.target is scaled_mm:
        a, b, rows, columns = (args[name] for name in ("a", "b", "inv_a", "inv_b"))
        return _Product(a, b, node, rows, columns, args["fast"], args["after"], args["bias"])
    if args["scale_result"] is not None:
        return refuse("fp8-form", f"{label(node)} has a scale_result")
    if fake(node).dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return refuse("fp8-form", f"the result of {label(node)} is {fake(node).dtype}")
    rows, columns = fake(node).shape
    if not isinstance(columns, int):
        return refuse("symbolic-features", f"{label(node)} has a symbolic width")
    (a, b), bias, fast = gemm_inputs(node), args["bias"], args["use_fast_accum"]
    scales = args["scale_a"], args["scale_b"]
    ones = bias is None and constant(scales[0]) == constant(scales[1]) == 1
    if ones and (factors := _outer_scales(node)) is not None:
        return _Product(a, b, *factors, fast, True, bias)
    for scale, shape in zip(scales, ((rows, 1), (1, columns)), strict=True):
        fits = single(scale) or same(fake(scale).shape, shape)
        if fake(scale).dtype != torch.float32 or not fits:
            text = f"{label(scale)} is {fake(scale).dtype} of shape {tuple(fake(scale).shape)}"
            return refuse("fp8-form", f"{label(node)}: {text}, not a scale of rows or columns")
    return _Product(a, b, node, scales[0], scales[1], fast, False, bias)


def _outer_scales(node: Node) -> tuple[Node, Node, Node] | None:
    """(result, factors of rows, of columns) if both multiply the rounded product; else None."""
    scaled = only_reader(node)
    end = only_reader(scaled)
    if scaled is None or end is None or scaled.target is not aten.mul.Tensor:
        return None
    outer = next((x for x in scaled.all_input_nodes if x is not node), None)
    if not is_cast(end) or fake(end).dtype != fake(node).dtype or outer is None:
        return None
    if outer.target is not aten.mul.Tensor or len(outer.all_input_nodes) != 2:
        return None
    (m, n), (rows, columns) = fake(node).shape, outer.all_input_nodes
    fit = same(fake(rows).shape, (m, 1)) and same(fake(columns).shape, (1, n))
    return (end, rows, columns) if fit else None


def _raise(node: Node, product: _Product, factors: "_Factors") -> None:
    put, out = Put(node, product.end), fake(node).dtype
    a, rows = factors(put, product.a, product.rows, [-1, 1])
    b, columns = factors(put, product.b, product.columns, [1, -1])
    bias = () if product.bias is None else (product.bias,)
    new = put(scaled_mm, a, b, rows, columns, out, product.fast, product.after, *bias)
    if _layout(a)[1]:
        new.meta[WEIGHT_GRADIENT] = True
    product.end.replace_all_uses_with(new)


class _Factors:
    """The factors of a graph's products. Equal quantizations are inserted once."""

    def __init__(self, graph: Graph, record: Record):
        self.record, self.scope = record, Scope(graph)
        self.cache: dict[tuple, tuple[Node, Node]] = {}
        self.refused: set[Node] = set()

    def __call__(self, put: Put, factor: Node, scale: Node, vector: list[int]) -> tuple[Node, Node]:
        """Returns ``factor`` in its original layout, and the number or vector (shape ``vector``)
        that undoes its scale. A copy stays if no cast of ours can write its layout."""
        node, transposed, is_copy = _layout(factor)
        q = base(node, lambda n: renames(n) or n.target is aten.clone.default)
        known = chain_of(q) if self.record.enabled("fp8_quantize") else None
        quantized = None if known is None else self._quantize(known, fake(node).shape)
        number = base(scale, relaid)
        if known is None or quantized is None:
            self._refuse(q)
            if is_copy:
                node, transposed = factor, False
        else:
            (node, inverse), flipped = quantized
            transposed ^= flipped
            scale = number = inverse if known.is_undone_by(scale) else scale
        if single(number):
            scale, vector = number, []
        if fake(scale).dim() != len(vector) or (vector and fake(scale).shape[vector.index(1)] != 1):
            scale = put.reshape(scale, vector)
        return put.transpose(node) if transposed else node, scale

    def _quantize(self, chain: Chain, shape: Any) -> tuple[tuple[Node, Node], bool] | None:
        """(the quantization of a matrix, does the chain quantize its transpose). None if the chain,
        which is multiplied in ``shape``, has no such matrix."""
        x, dims = chain.x, chain.dims
        if flipped := is_transpose(x):
            x, dims = x.all_input_nodes[0], tuple(sorted(1 - d for d in dims))
        rank, width = fake(x).dim(), fake(x).shape[-1]
        if rank != 2:
            if dims not in ((), (rank - 1,)) or not isinstance(width, int):
                return None
            dims = dims and (1,)
        if not same(shape[0 if flipped else 1], width):
            return None
        q = chain.q
        side = q in self.scope.forward, q in self.scope.graded, checkpoint(q)
        key = origin(x), str(width), dims, chain.kind, side
        if key not in self.cache:
            put = Put(q)
            x = x if rank == 2 else put.reshape(x, [-1, width])
            call = put(quantize, x, list(dims), *chain.kind)
            self.cache[key] = put(operator.getitem, call, 0), put(operator.getitem, call, 1)
            self.record.fire("fp8_quantize", converts(q))
        return self.cache[key], flipped

    def _refuse(self, q: Node) -> None:
        """If ``q`` casts to FP8, note once why it is not a supported quantization."""
        if q in self.refused or not converts(q):
            return
        self.refused.add(q)
        text = f"{label(q)} casts to FP8 in another way than torchao's dynamic scaling"
        self.record.refuse("fp8", q, refuse("fp8-cast", text))


def _layout(node: Node) -> tuple[Node, bool, bool]:
    """(the tensor whose layout ``node`` changes, is it transposed, is it a copy)."""

    def changes_layout(node: Node) -> bool:
        if is_transpose(node) or node.target is aten.clone.default:
            return True
        return renames(node) and same(fake(node).shape, fake(node.all_input_nodes[0]).shape)

    *changes, node = chain(node, changes_layout)
    turns, copies = map(is_transpose, changes), (n.target is aten.clone.default for n in changes)
    return node, sum(turns) % 2 == 1, any(copies)
