# SPDX-License-Identifier: Apache-2.0
"""The columns of a packed projection that are rotated become a product of their own.

Before (Phi-3's ``qkv_proj``; slices, splits and views of three parts alike)::

    z = x @ W;  q, k, v = z.split(...);  q, k = rotate(q), rotate(k)

After::

    y, v = x @ W[:, :a], x @ W[:, a:];  q, k = y.split(...);  q, k = rotate(q), rotate(k)

Why it is valid: each column of a product depends on one column of its right factor; parts of W are
views. Why it pays: attention's gradient reads q and k rotated, and v. If v is a part of z, all of z
is kept beside them: 0.75 of 5.97 GiB for eight layers of Phi-3 mini (8192 tokens). The gradients
stay those of one product (``rewrite.columns``).

Leaves alone: products that are rotated as a whole, have a bias, or are read other than by columns.
"""

import itertools

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.layout import relay, seen
from coda_inductor.graph.nodes import arguments, aten, fake, may_view, row_major
from coda_inductor.graph.read import op_name
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import chain, readers
from coda_inductor.record import Record
from coda_inductor.semantic.define import LINEAR

#: First column and end.
Span = tuple[int, int]
_SPLITS = ("split", "split_with_sizes", "unbind")


def part_columns(graph: Graph, record: Record) -> None:
    """Apply the rewrite to a joint graph, in place."""
    mapped: dict[Node, set[Node]] = {}
    for node in (n for n in graph.nodes if n.target in LINEAR):
        *views, gemm = chain(node.all_input_nodes[0], may_view)
        if gemm.target is aten.mm.default:
            mapped.setdefault(gemm, set()).update(views)
    for gemm, own in mapped.items():
        spans = _spans(gemm)
        products = _products(spans, {spans[part] for part in own & spans.keys()})
        if len(products) > 1:
            why = record.sites.refusal(gemm) or seen(spans)
            why = why or record.sites.plan.parts_lose(gemm, [b - a for a, b in products])
            if why is None:
                _split(gemm, spans, products)
            else:
                record.refuse("packed projection", gemm, why.excused())


def _spans(gemm: Node) -> dict[Node, Span]:
    """The parts of a product (M, N) that are read, if nothing else of it is; else empty."""
    _, users = readers(gemm, lambda n: op_name(n) in ("view", *_SPLITS))
    spans = {user: span for user in users if (span := _span(user, gemm))}
    return spans if len(spans) == len(users) else {}


def _span(part: Node, gemm: Node) -> Span | None:
    """The columns that ``part``, (..., width) or (..., H, width / H), is of ``gemm``, or None."""
    if op_name(part) in ("slice", "select", "getitem"):  # these leave the order of rows
        view, m, step = fake(part), fake(gemm).shape[0], 16 // fake(gemm).element_size()
        start = view.storage_offset()
        for dims in (1, 2):
            if same(view.shape[:-dims].numel(), m) and isinstance(start, int):
                own = torch.empty_strided(view.shape[-dims:], view.stride()[-dims:], device="meta")
                if own.numel() and row_major(own) and start % step == 0:
                    return start, start + own.numel()
    return None


def _products(spans: dict[Node, Span], mapped: set[Span]) -> list[Span]:
    """The columns of each product: spans that touch, and are all ``mapped`` or all not. Empty if
    some columns are in two spans."""
    ordered = sorted(set(spans.values()))
    products = ordered[:1]
    for before, span in itertools.pairwise(ordered):
        if span[0] < before[1]:
            return []
        joins = before[1] == span[0] and (before in mapped) == (span in mapped)
        products[-1:] = [(products[-1][0], span[1])] if joins else [products[-1], span]
    return products


def _split(gemm: Node, spans: dict[Node, Span], products: list[Span]) -> None:
    put, (x, weight) = Put(gemm), gemm_inputs(gemm)
    made = {p: put(aten.mm.default, x, put(aten.slice.Tensor, weight, 1, *p)) for p in products}
    for part, (start, end) in spans.items():
        near, whole = Put(part), part.all_input_nodes[0]
        whole = whole.all_input_nodes[0] if op_name(whole) in _SPLITS else whole
        first, last = max(p for p in products if p[0] <= start)
        columns = made[first, last]
        if (start, end) != (first, last):
            columns = near(aten.slice.Tensor, columns, 1, start - first, end - first)
        # Not the sizes of the part, which would go on reading the product.
        sizes = near.sizes(x) if whole is gemm else arguments(whole)["size"]
        shape = [n if isinstance(n, int) else sizes[i] for i, n in enumerate(fake(part).shape)]
        relay(part, near.reshape(columns, shape))
    prune(list(spans))
