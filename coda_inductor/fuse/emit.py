# SPDX-License-Identifier: Apache-2.0
"""Put a region's program into the graph: one custom op call, and views back to the old shapes.

Before::

    mm, view, add (residual), mul (gamma), mul (x * x), mean

After::

    gemm_epilogue([a], [b], [residual, gamma], program, config, site, strict) -> getitem 0, 1, 2
    view (residual stream), view (operand of the next GEMM), sum of the partials / N
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.fuse.region import SWAPPED, Region
from coda_inductor.fuse.sums import factors
from coda_inductor.graph.edit import insert, replace_parts, settle
from coda_inductor.graph.nodes import VIEWS, arguments, aten, fake, prims
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import base
from coda_inductor.program import EpilogueProgram, reference
from coda_inductor.program.dtypes import HALF
from coda_inductor.program.heads import swap
from coda_inductor.program.ir import ROUTES
from coda_inductor.refusal import Refused, refuse
from coda_inductor.runtime import direct, op
from coda_inductor.semantic.loss import row_logsumexp


def emit(
    graph: Graph,
    region: Region,
    program: EpilogueProgram,
    config: str,
    *,
    site: str = "",
    strict: bool = False,
) -> Node:
    """Replace ``region`` by a call of ``coda_inductor::gemm_epilogue``; returns the call.
    ``config``, ``site`` and ``strict`` as that op takes them.

    The graph is in order afterwards and the region's nodes are gone.
    """
    anchor = region.anchors[-1]
    inputs = [*region.anchors, *(node for node, _ in region.operands)]
    inputs += [n for a in region.anchors for n in a.all_input_nodes]
    direct.install()
    first = max(inputs)
    end = first.next
    with graph.inserting_before(end):
        as_, bs = factors(graph, region)
        operands = [_operand(graph, node, kind, region, end) for node, kind in region.operands]
        args = (as_, bs, operands, program.to_json(), config, site, strict)
        call = insert(graph, op.OP, args, like=anchor)
        outputs = [
            insert(graph, operator.getitem, (call, i), like=anchor)
            for i in range(len(program.outputs))
        ]
        for output, nodes in zip(outputs, region.stored().values(), strict=False):
            _rewire_store(graph, region, output, nodes)
        names = [reduce.name for reduce in program.reduces]
        partials = dict(zip(names, outputs[len(program.stores) :], strict=True))
        for node, reduce in region.reduces.items():
            new = _finalize(graph, region, partials[reduce.name], node)
            node.replace_all_uses_with(new)
    new, node = [], first.next
    while node is not end:
        new.append(node)
        node = node.next
    for node in sorted((*region.values, *region.reduces), reverse=True):
        graph.erase_node(node)
    settle(new)
    return call


def check_views(region: Region) -> None:
    """Check that every shape which the outside reads can be rebuilt from (M, N). Called before
    ``emit`` changes anything.

    Raises:
        Refused: a shape has several symbolic sizes, and no view in the region makes it.
    """
    for nodes in region.stored().values():
        for node in nodes:
            _sizes(node, region)
    for node, reduce in region.reduces.items():
        if reduce.axis == "row":
            _sizes(node.all_input_nodes[0], region)


def expand(graph: Graph, call: Node, *, exact: bool) -> None:
    """Replace a ``gemm_epilogue`` call by its reference as aten nodes, for Inductor to compile.
    ``exact`` as :func:`coda_inductor.program.reference.run` takes it."""
    given = arguments(call)
    tensors = [list(given[name]) for name in ("as_", "bs", "operands")]
    args = (EpilogueProgram.from_json(given["program"]), exact, *tensors)
    replace_parts(call, splice(graph, call, _reference, args, like=call))


def _reference(program, exact, as_, bs, operands):
    return reference.run(program, as_, bs, operands, exact=exact)


def _operand(graph: Graph, node: Node, kind: str, region: Region, before: Node) -> Node:
    _, n, _ = region.shape
    if kind in ("table", *ROUTES):
        return node
    if kind == SWAPPED:
        assert region.heads is not None, "rows are swapped for a rotation"
        row = _operand(graph, node, "row", region, before)
        return splice(graph, before, swap, (row, *region.heads), like=region.anchors[-1])
    if kind == "col" and region.grouped and fake(node).dtype in HALF:
        to = prims.convert_element_type.default
        node = insert(graph, to, (node, torch.float32), like=region.anchors[-1])
    row = [-1, n] if region.grouped else [n]
    sizes = {"tile": [-1, n], "row": row, "col": [-1], "scalar": []}[kind]
    if kind == "row" and len(region.accs) == 2:
        return _twice(graph, node, row, region)
    if fake(node).dim() == len(sizes) and (kind != "tile" or same(fake(node).shape[1], n)):
        return node
    return insert(graph, aten.reshape.default, (node, sizes), like=region.anchors[-1])


def _twice(graph: Graph, node: Node, sizes: list[int], region: Region) -> Node:
    """A row vector for a paired program: every value twice, because its columns are interleaved."""
    like = region.anchors[-1]
    column = insert(graph, aten.reshape.default, (node, [*sizes, 1]), like=like)
    both = insert(graph, aten.expand.default, (column, [*[-1] * len(sizes), 2]), like=like)
    return insert(graph, aten.reshape.default, (both, [*sizes[:-1], 2 * sizes[-1]]), like=like)


def _rewire_store(graph: Graph, region: Region, output: Node, nodes: list[Node]) -> None:
    """Let everything outside that reads one of ``nodes`` (one value in several dtypes and shapes)
    read ``output`` instead. Two tensors share memory afterwards if they did before."""
    inside = {*region.values, *region.reduces}
    tensors: dict[Node, Node] = {}
    for node in nodes:
        tensor = base(node)
        if tensor not in tensors:
            dtype, new = fake(node).dtype, output
            if dtype != fake(output).dtype:
                new = insert(graph, prims.convert_element_type.default, (new, dtype), like=node)
            elif any(fake(other).dtype == dtype for other in tensors):
                new = insert(graph, aten.clone.default, (new,), like=node)
            tensors[tensor] = new
        new = tensors[tensor]
        if not same(fake(node).shape, fake(new).shape):
            new = insert(graph, aten.view.default, (new, _sizes(node, region)), like=node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)


def _finalize(graph: Graph, region: Region, partials: Node, node: Node) -> Node:
    """Fold the partials of a reduction (rule R2), the part of it that is outside the kernel."""
    reduce = region.reduces[node]
    along = -1 if reduce.axis == "row" else 0
    if reduce.combine == "logsumexp":
        new = insert(graph, row_logsumexp, (partials,), like=node)
    else:
        fold = aten.sum.dim_IntList if reduce.combine == "add" else aten.amax.default
        new = insert(graph, fold, (partials, [along], True), like=node)
    if node.target is aten.mean.dim:
        new = insert(graph, aten.div.Tensor, (new, region.shape[1]), like=node)
    if fake(new).dtype != fake(node).dtype:
        new = insert(graph, prims.convert_element_type.default, (new, fake(node).dtype), like=node)
    (source,) = node.all_input_nodes
    rank = fake(source).dim()
    kept = fake(node).dim() == rank
    if reduce.axis == "col":
        sizes = [1] * (rank - 1 if kept else 0) + [region.shape[1]]
    else:
        sizes = _sizes(source, region)[:-1] + ([1] if kept else [])
    return insert(graph, aten.view.default, (new, sizes), like=node)


def _sizes(node: Node, region: Region) -> list[Any]:
    """The sizes of ``node`` as arguments of a view: numbers, one -1, or, when several are symbolic,
    nodes (the arguments of the view that made the shape)."""
    shape = fake(node).shape
    symbolic = sum(isinstance(s, torch.SymInt) for s in shape)
    if not symbolic or (symbolic == 1 and not any(isinstance(s, int) and s == 0 for s in shape)):
        return [-1 if isinstance(s, torch.SymInt) else s for s in shape]
    for view in region.values:
        makes_shape = view.target in VIEWS and same(fake(view).shape, shape)
        if makes_shape:
            return list(arguments(view)["size"])
    text = f"no view in the region makes the symbolic shape {tuple(shape)}"
    raise Refused(refuse("symbolic-shape", text))
