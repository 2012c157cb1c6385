# SPDX-License-Identifier: Apache-2.0
"""Bytes that a graph moves through memory: an account, not a measurement.

GEMMs, attention, fused sites and whatever is not elementwise are a kernel each. Elementwise ops,
casts, gathers and reductions that lie between the same kernels share one stage, as if Inductor made
one kernel of it. A kernel or stage reads each tensor once and writes each result that another one,
or the caller, reads. Views and constants cost nothing.

Inductor also splits a stage, recomputes cheap values, and finds some of its inputs in a cache. What
is missing is missing before and after alike.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import log_softmax, schema, softmax, to_copy
from coda_inductor.fuse.columns import COLUMNS
from coda_inductor.fuse.traffic import size
from coda_inductor.graph import walk
from coda_inductor.graph.nodes import ALIASES, arguments, aten, fake, is_cast
from coda_inductor.graph.walk import readers

#: Not tagged as pointwise, but Inductor's kernels compute them all the same.
_ALSO = frozenset(
    {
        aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default,
        aten.amin.default, aten.var_mean.correction, aten.var.correction, aten.any.dim,
        aten.any.default, aten.all.default, aten.argmax.default, aten.prod.dim_int,
        softmax, log_softmax, aten.cumsum.default, aten.cat.default, COLUMNS,
        aten.index.Tensor, aten.embedding.default, aten.gather.default, aten.clone.default,
        aten.constant_pad_nd.default, aten.slice_scatter.default, aten.select_scatter.default,
        aten.copy_.default, aten.native_layer_norm.default, aten.repeat.default, aten.flip.default,
        aten.native_dropout.default, aten.bernoulli.p, aten.rand_like.default,
        torch.ops.prims.rev.default,
        to_copy, torch.ops.prims.convert_element_type.default,
    }
)  # fmt: skip
#: They read as much of their table as they write.
_GATHERS = (aten.index.Tensor, aten.embedding.default, aten.gather.default)


def moved(graph: Graph) -> int:
    """Bytes that an aten graph (an inference graph, or one side of a partitioned one) moves."""
    kernels = _kernels(graph)
    reads: dict[tuple[object, Node], int] = {}
    writes = 0
    for node, kernel in kernels.items():
        if any(kernels.get(user) != kernel for user in _users(node)):
            writes += size(node)
        if node.target is operator.getitem:
            continue
        writes += _inside(node)
        for arg in node.all_input_nodes:
            source = base(arg)
            if not _has_tensor(source) or _constant(source) or kernels.get(source) == kernel:
                continue
            read = min(size(arg), size(source))
            if node.target in _GATHERS and arg is node.all_input_nodes[0]:
                read = min(read, size(node))
            reads[kernel, source] = max(read, reads.get((kernel, source), 0))
    return sum(reads.values()) + writes


def base(node: Node) -> Node:
    """The tensor in memory that ``node`` is a view of."""
    return walk.base(node, _is_free)


def _kernels(graph: Graph) -> dict[Node, Node | int]:
    """What each node that does something runs in: a kernel of its own, named by the op, or a
    stage, by its number."""
    stages: dict[Node, int] = {}
    for node in graph.nodes:
        inputs = _inputs(node)
        if node.op == "call_function" and inputs and _has_tensor(node) and not _is_free(node):
            before = (stages.get(i, 0) + (not (_joins(node) and _joins(i))) for i in inputs)
            stages[node] = max(before)
    for node in reversed(stages):  # what is cheap runs where it is read, not where it could
        users = _users(node)
        if _joins(node) and all(user in stages for user in users):
            after = (stages[u] - (not _joins(u)) for u in users)
            stages[node] = min(after, default=stages[node])
    return {node: stage if _joins(node) else _op(node) for node, stage in stages.items()}


def _op(node: Node) -> Node:
    """The op that ``node`` is, or is a result of."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _joins(node: Node) -> bool:
    """Does it share a kernel with what is around it? Inputs of the graph are in nobody's way."""
    op = _op(node)
    pointwise = torch.Tag.pointwise in getattr(op.target, "tags", ())
    return op.op == "placeholder" or pointwise or op.target in _ALSO


def _inside(node: Node) -> int:
    """The gradient of the logits that is made and used in slices: written, and read for each
    result."""
    if node.target is not torch.ops.coda_inductor.linear_cross_entropy_backward.default:
        return 0
    given = arguments(node)
    results = (given["weight"] is not None, given["x"] is not None, given["bias"])
    return size(given["logits"]) * (1 + sum(results))


def _users(node: Node) -> list[Node]:
    """What reads ``node`` or a view of it."""
    return readers(node, through=_is_free)[1]


def _is_free(node: Node) -> bool:
    """Does ``node`` cost nothing: is it a view, or a part of what a view returns? A widening cast
    happens where its result is read."""
    node = _op(node)
    if node.target in ALIASES:
        return True
    if is_cast(node):
        return size(node) >= size(node.all_input_nodes[0])
    said = schema(node.target)
    if said is None or not said.returns:
        return False
    alias = said.returns[0].alias_info
    return alias is not None and not alias.is_write


def _inputs(node: Node) -> list[Node]:
    found = map(base, node.all_input_nodes)
    return [n for n in found if _has_tensor(n) and not _constant(n)]


def _constant(node: Node) -> bool:
    """Made of nothing: ``full``, ``arange`` and the like."""
    return node.op == "call_function" and not any(map(_has_tensor, node.all_input_nodes))


def _has_tensor(node: Node) -> bool:
    return isinstance(fake(node), (torch.Tensor, tuple, list))
