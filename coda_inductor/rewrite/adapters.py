# SPDX-License-Identifier: Apache-2.0
"""Adapters: low-rank products must not keep other work out of epilogues.

Before (``r`` the rank of A (r, K) and B (N, r), s a number)::

    t = dy * s;  dh = t @ B;  dB = t.T @ h                        # t is as large as dy
    dx = ((dh_u @ A_u + du @ W_u) + dh_g @ A_g) + dg @ W_g        # of two layers that read one x

After::

    dh = (dy @ B) * s;  dB = (dy.T @ h) * s
    dx = ((du @ W_u + dg @ W_g) + dh_u @ A_u) + dh_g @ A_g

Why it is valid: a number commutes with a product, and terms commute with each other. Values are
rounded as often as before, at other steps.

Why it pays: t is neither written nor read. Two terms of full rank become one GEMM (``fuse.sums``),
whose epilogue adds the others; a low-rank term between them would prevent that.

Leaves alone: a scaled tensor with other readers than small products; float16, in which a product
that is scaled late may overflow; sums whose terms of full rank stand first already, or lie on two
sides of a checkpoint's border.
"""

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.gemms import addends, gemm_inputs, low_rank
from coda_inductor.graph.nodes import arguments, aten, fake, is_transpose, renames
from coda_inductor.graph.sides import checkpoint
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import base, only_reader, readers
from coda_inductor.record import Record
from coda_inductor.semantic.dropout import BACKWARD

#: The tensor that is no longer scaled must be at least this many times as large as a product.
_SMALLER = 8


def reorder_low_rank(graph: Graph, _record: Record) -> None:
    """Scale results of low-rank products, not inputs, and add low-rank terms last, in place."""
    for node in [n for n in graph.nodes if n.target is aten.mul.Tensor]:
        _scale_products(node)
    for node in [n for n in graph.nodes if addends(n)]:
        _full_rank_first(node)


def _scale_products(scaled: Node) -> None:
    """Scale the products of ``scaled``, a tensor times a number, instead of the tensor."""
    x, number = (arguments(scaled)[name] for name in ("input", "other"))
    if not isinstance(number, (int, float)) or fake(scaled).dtype == torch.float16:
        return
    names, products = readers(scaled, lambda n: renames(n) or is_transpose(n))
    if fake(x).dtype != fake(scaled).dtype or not products:
        return
    limit = hint(fake(scaled).numel()) // _SMALLER
    for product in products:
        mm = product.target is aten.mm.default
        once = mm and sum(factor in names for factor in gemm_inputs(product)) == 1
        if not once or hint(fake(product).numel()) > limit:
            return
    replace(scaled, x)
    for product in products:
        replace(product, Put(product, product.next).mul(product, number))


def _full_rank_first(total: Node) -> None:
    reader = only_reader(total)
    if reader is not None and addends(reader) and _joins(total, reader):
        return  # a part of a longer sum
    terms = _terms(total)
    products = [t for t in terms if base(t).target is aten.mm.default]
    full = [t for t in products if not low_rank(base(t))]  # a term may occur several times
    # The gradient of low-rank layers behind dropout is such a term too.
    dropped = any(n.target is BACKWARD for term in terms for n in base(term).all_input_nodes)
    mixed = dropped or len(full) < len(products)
    if len({*full}) < 2 or not mixed or terms[: len(full)] == full:
        return
    first, *rest = full + [t for t in terms if t not in full]
    for term in rest:
        first = Put(total).add(first, term)
    replace(total, first)


def _terms(total: Node) -> list[Node]:
    terms: list[Node] = []
    todo = addends(total)[::-1]
    while todo:
        term = todo.pop()
        if (inner := addends(term)) and len(term.users) == 1 and _joins(term, total):
            todo += reversed(inner)
        else:
            terms.append(term)
    return terms


def _joins(part: Node, total: Node) -> bool:
    """May the sum ``part``, which only ``total`` reads, be computed at any position in ``total``? A
    node with one reader lies on its reader's side of the graph."""
    a, b = fake(part), fake(total)
    return a.dtype == b.dtype and a.shape == b.shape and checkpoint(part) == checkpoint(total)
