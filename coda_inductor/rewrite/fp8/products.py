# SPDX-License-Identifier: Apache-2.0
"""Scaled products, without the copies in front of them.

Before (the second form where torchao's rowwise kernel would be slow)::

    p = _scaled_mm(clone(q.t()), clone(r.t()).t(), 1 / s, 1 / t, None, None, bfloat16, fast)
    p = bfloat16(_scaled_mm(q, r, one, one, None, None, bfloat16) * (1 / s * 1 / t))

After::

    p = scaled_mm(q.t(), r, 1 / s, 1 / t, bfloat16, fast, after, bias)

Why it is valid: the op's definition makes the copies again where ``_scaled_mm`` wants them, and
multiplies after the product where ``after`` says so. A tensor's scale that torchao repeats for
every column stays one number: the definition repeats it where the other one is a vector. Scales of
inference are reciprocals already.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import WEIGHT_GRADIENT
from coda_inductor.graph.nodes import aten, constant, fake, is_cast, is_transpose, renames
from coda_inductor.graph.sizes import same
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.fp8.merge import Quantized
from coda_inductor.semantic.fp8 import scaled_mm

#: The parameters of ``_scaled_mm`` after its factors.
_NAMES = ("scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
_REPEATS = (aten.repeat.default, aten.expand.default, aten.clone.default)


@dataclass(frozen=True)
class Product:
    """One scaled product.

    Attributes:
        node: the ``_scaled_mm`` node.
        end: the node that holds the result: itself, or the cast after the multiplication.
        inverses: what multiplies rows and columns.
        out_dtype: of the result.
        fast: whether it accumulates fast.
        after: whether torchao multiplies after the product.
        bias: what is added to columns, or None.
    """

    node: Node
    end: Node
    inverses: tuple[Node, Node]
    out_dtype: torch.dtype
    fast: bool
    after: bool
    bias: Node | None = None


def product_of(node: Node) -> Product | Refusal:
    """What the ``_scaled_mm`` node means, or why it stays as it is."""
    given = {**dict(zip(_NAMES, node.args[2:], strict=False)), **node.kwargs}
    if given.get("scale_result") is not None:
        return refuse("fp8-form", f"{node.name} has a scale_result")
    if fake(node).dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return refuse("fp8-form", f"{node.name} makes {fake(node).dtype}")
    if not isinstance(fake(node).shape[1], int) or not isinstance(fake(node.args[1]).shape[1], int):
        return refuse("symbolic-features", f"{node.name} has a symbolic width")
    one, other = given["scale_a"], given["scale_b"]
    fast = bool(given.get("use_fast_accum", False))
    bias = given.get("bias")
    ones = bias is None and constant(one) == 1 and constant(other) == 1
    if ones and (found := _multiplied(node)) is not None:
        end, inverses = found
        return Product(node, end, inverses, fake(node).dtype, fast, True)
    shape = fake(node).shape
    for scale, wanted in ((one, (shape[0], 1)), (other, (1, shape[1]))):
        if fake(scale).dtype != torch.float32 or not (
            _single(scale) or same(fake(scale).shape, wanted)
        ):
            text = f"{scale.name} is {fake(scale).dtype} of shape {tuple(fake(scale).shape)}"
            return refuse("fp8-form", f"{node.name}: {text}, no scale of rows or columns")
    return Product(node, node, (one, other), fake(node).dtype, fast, False, bias)


def _single(node: Node) -> bool:
    """Is ``node`` one number, whatever its shape?"""
    return all(isinstance(size, int) and size == 1 for size in fake(node).shape)


def _multiplied(node: Node) -> tuple[Node, tuple[Node, Node]] | None:
    """(the result, (rows' factors, columns' factors)) where the product is multiplied with both,
    and rounded again."""
    rows, columns = fake(node).shape
    if len(node.users) != 1:
        return None
    (scaled,) = node.users
    if scaled.target is not aten.mul.Tensor or len(scaled.users) != 1:
        return None
    (end,) = scaled.users
    outer = scaled.args[1] if scaled.args[0] is node else scaled.args[0]
    if not is_cast(end) or fake(end).dtype != fake(node).dtype:
        return None
    if not isinstance(outer, Node) or outer.target is not aten.mul.Tensor:
        return None
    first, second = outer.args
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    if not same(fake(first).shape, (rows, 1)) or not same(fake(second).shape, (1, columns)):
        return None
    return end, (first, second)


def raise_product(graph: Graph, product: Product, known: dict[Node, Quantized]) -> Node:
    """Put the semantic op in place of ``product``; ``known``: quantizations by their results."""
    scales = {made.scale: made for made in known.values()}
    put = Put(graph, like=product.node)
    with graph.inserting_before(product.end):
        factors = [_operand(put, x, known) for x in product.node.args[:2]]
        rows, columns = (
            _inverse(put, inverse, scales, row=row)
            for inverse, row in zip(product.inverses, (True, False), strict=True)
        )
        if _single(rows) and _single(columns):
            rows, columns = (put.reshape(x, []) if fake(x).dim() else x for x in (rows, columns))
        extra = [] if product.bias is None else [product.bias]
        new = put(
            scaled_mm, *factors, rows, columns, product.out_dtype, product.fast, product.after,
            *extra,
        )  # fmt: skip
    if _lies(product.node.args[0])[1]:
        new.meta[WEIGHT_GRADIENT] = True
    product.end.replace_all_uses_with(new)
    return new


def _operand(put: Put, factor: Node, known: Collection[Node]) -> Node:
    """``factor`` without what only lays it out anew: transposes in pairs, views of its own shape
    and, where it is one of the ``known`` quantizations, whose cast can write it so, copies."""
    node, turned, copied = _lies(factor)
    if copied and node not in known:
        return factor
    return put.transpose(node) if turned else node


def _lies(node: Node) -> tuple[Node, bool, bool]:
    """(what ``node`` is laid out anew of, whether it is its transpose, whether it is a copy)."""
    turned = copied = False
    while is_transpose(node) or node.target is aten.clone.default or _same_view(node):
        turned ^= is_transpose(node)
        copied |= node.target is aten.clone.default
        node = node.args[0]
    return node, turned, copied


def _same_view(node: Node) -> bool:
    return renames(node) and same(fake(node).shape, fake(node.args[0]).shape)


def _inverse(put: Put, node: Node, scales: dict[Node, Quantized], *, row: bool) -> Node:
    """``node``, the factors of rows or columns, as a view of what undoes a quantization's scale
    where it is that; one number for all is 0-dim."""
    source = _inverted(node, scales)
    if source is None:
        return put.reshape(node, []) if fake(node).dim() and _single(node) else node
    inverse = source.inverse
    if fake(inverse).dim() < 2:
        return inverse
    wanted = fake(node).shape
    if same(fake(inverse).shape, wanted):
        return inverse
    return put.reshape(inverse, [-1, 1] if row else [1, -1])


def _inverted(node: Any, scales: dict[Node, Quantized]) -> Quantized | None:
    """The quantization whose scale ``node`` undoes, laid out in some way."""
    size, times = fake(node).numel(), 0
    while isinstance(node, Node) and node not in scales:
        single = node.args and isinstance(node.args[0], Node) and fake(node.args[0]).numel() == 1
        if node.target is aten.reciprocal.default:
            times += 1
        elif not (renames(node) or is_transpose(node) or (single and node.target in _REPEATS)):
            return None
        node = node.args[0]
    if not isinstance(node, Node) or times != (0 if scales[node].divides else 1):
        return None
    found = scales[node]
    alike = same(fake(node).numel(), size) or fake(node).dim() == 0
    return found if alike else None
