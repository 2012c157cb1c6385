# SPDX-License-Identifier: Apache-2.0
"""Grouped products that no epilogue absorbed become the products that the user wrote.

Before (two parts of one weight, each with its own product so that the fuser can pair them)::

    lower, upper = split(W, f, 2)
    g, u = grouped_mm(x, lower, offsets, rows), grouped_mm(x, upper, offsets, rows)
    dx = grouped_mm(dg, lower.mT, offsets) + grouped_mm(du, upper.mT, offsets)

After::

    g, u = split(grouped_mm(x, W, offsets, rows), f, 1)
    dx = grouped_mm(cat([dg, du], 1), W.mT, offsets)

Why it is valid: each column of a product depends on one column of its right factor; a sum of
products is a product over all of their K. Gathers and products stay ``semantic.experts``'.
"""

import operator

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune, replace
from coda_inductor.graph.gemms import addends, gemm_inputs, routes_of
from coda_inductor.graph.layout import relay, seen
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.read import op_name
from coda_inductor.graph.walk import parts
from coda_inductor.record import Record
from coda_inductor.semantic.experts import grouped_mm


def finish_experts(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to the remaining grouped products, in place."""
    for node in list(graph.nodes):
        terms = addends(node)
        if terms and all(term.target is grouped_mm for term in terms):
            _merge_terms(node, terms)
    for node in [n for n in graph.nodes if n.target is aten.split.Tensor]:
        _merge_columns(node)


def _parts(split: Node) -> list[Node]:
    """The parts of ``split``, in order; empty if any part is not read."""
    by_index = parts(split)
    whole = len(by_index) == len(fake(split)) == len(split.users)
    return [by_index[i] for i in range(len(by_index))] if whole else []


def _merge_columns(split: Node) -> None:
    weight, size, dim = (arguments(split)[name] for name in ("input", "split_size", "dim"))
    read = [list(part.users) for part in _parts(split)]
    products = [users[0] for users in read if len(users) == 1 and users[0].target is grouped_mm]
    if dim % 3 != 2 or len(products) != len(read) or len(products) < 2:
        return
    inputs = {(gemm_inputs(p)[0], routes_of(p)) for p in products}
    if len(inputs) != 1 or fake(weight).dim() != 3 or seen(products):
        return
    (a, (offsets, rows)) = inputs.pop()
    put = Put(min(products))
    columns = put(aten.split.Tensor, put(grouped_mm, a, weight, offsets, rows), size, 1)
    for i, product in enumerate(products):
        relay(product, put(operator.getitem, columns, i))
    prune(products)


def _merge_terms(total: Node, terms: list[Node]) -> None:
    """Merge a sum of products with both parts of one weight's rows."""
    by_weight = {gemm_inputs(t)[1]: t for t in terms}
    halves = {n.all_input_nodes[0]: t for n, t in by_weight.items() if op_name(n) == "permute"}
    splits = {n for half in halves for n in half.all_input_nodes}
    split = splits.pop() if len(splits) == 1 else total
    if split.target is not aten.split.Tensor or {*halves} != {*_parts(split)} or len(halves) != 2:
        return
    terms = [halves[half] for half in _parts(split)]
    if len({routes_of(t) for t in terms}) != 1:
        return
    put = Put(total)
    a = put(aten.cat.default, [gemm_inputs(t)[0] for t in terms], 1)
    b = put(aten.permute.default, arguments(split)["input"], [0, 2, 1])
    replace(total, put(grouped_mm, a, b, *routes_of(terms[0])))
