# SPDX-License-Identifier: Apache-2.0
"""Put a region's program into the graph: one call of a custom op, and views with the old shapes.

Before::

    mm, view, add (residual), mul (gamma), mul (x * x), mean

After::

    gemm_epilogue([a], [b], [residual, gamma], program, config, site, strict) -> getitem 0, 1, 2
    view (residual stream), view (operand of the next GEMM), sum of the partials / N
"""

import operator
from typing import Any

import torch
from torch.fx import Node

from coda_inductor import kernels
from coda_inductor.fuse.region import SWAPPED, Region
from coda_inductor.fuse.sums import factors
from coda_inductor.graph.edit import Put, reorder, replace_parts
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.read import op_name
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import base
from coda_inductor.program import EpilogueProgram, reference
from coda_inductor.program.dtypes import HALF
from coda_inductor.program.operands import KINDS
from coda_inductor.program.reference import swap
from coda_inductor.refusal import Refused, refuse
from coda_inductor.semantic.loss import row_logsumexp


def emit(region: Region, site: kernels.Site, *, strict: bool = False) -> Node:
    """Replace ``region``, planned as ``site``, by a call of ``coda_inductor::gemm_epilogue``;
    returns the call. ``strict`` is passed to the op.

    The graph is in order afterwards and the region's nodes are gone.
    """
    inputs = [*region.anchors, *(node for node, _ in region.operands)]
    inputs += [n for a in region.anchors for n in a.all_input_nodes]
    first = max(inputs)
    end = first.next
    put = Put(region.anchors[-1], end)
    as_, bs = factors(region, end)
    operands = [_operand(put, node, kind, region) for node, kind in region.operands]
    program, call = site.program, kernels.call(put, site, as_, bs, operands, strict=strict)
    outputs = [put(operator.getitem, call, i) for i in range(len(program.outputs))]
    for output, nodes in zip(outputs, region.stored().values(), strict=False):
        _rewire_store(end, region, output, nodes)
    names = [reduce.name for reduce in program.reduces]
    partials = dict(zip(names, outputs[len(program.stores) :], strict=True))
    for node in region.reduces:
        node.replace_all_uses_with(_finalize(Put(node, end), region, partials))
    new, node = [], first.next
    while node is not end:
        new.append(node)
        node = node.next
    for node in sorted((*region.values, *region.reduces), reverse=True):
        node.graph.erase_node(node)
    sizes = {size for node in new for size in node.all_input_nodes if not size < end}
    reorder([*new, *sizes])  # symbolic sizes of a view in the region may stand behind it
    return call


def check_views(region: Region) -> None:
    """Check that every shape that nodes outside of ``region`` read can be rebuilt from (M, N).
    Called before ``emit`` changes anything.

    Raises:
        Refused: a shape has several symbolic sizes, and no view in the region makes it.
    """
    for nodes in region.stored().values():
        for node in nodes:
            _sizes(node, region)
    for node, reduce in region.reduces.items():
        if reduce.axis == "row":
            _sizes(node.all_input_nodes[0], region)


def expand(call: Node, *, exact: bool) -> None:
    """Replace a ``gemm_epilogue`` call by its reference as aten nodes, for Inductor to compile.
    ``exact`` as :func:`coda_inductor.program.reference.run` takes it."""
    kwargs = arguments(call)
    tensors = [list(kwargs[name]) for name in ("as_", "bs", "operands")]
    args = (kwargs["program"], exact, *tensors)  # text, which ``splice`` can tell equal
    replace_parts(call, splice(call, _reference, args))


def _reference(program, exact, as_, bs, operands):
    return reference.run(EpilogueProgram.from_json(program), as_, bs, operands, exact=exact)


def _operand(put: Put, node: Node, kind: str, region: Region) -> Node:
    _, n, _ = region.shape
    if kind == SWAPPED:
        assert region.heads is not None, "rows are swapped within heads"
        row = _operand(put, node, "row", region)
        return splice(put.before, swap, (row, *region.heads), like=put.like)
    if kind == "col" and region.grouped and fake(node).dtype in HALF:
        node = put.cast(node, torch.float32)
    spec, sizes = KINDS[kind], dict.fromkeys("MBE", -1) | {"N": n}
    if spec.route or "H" in spec.dims:
        return node
    shape = [*spec.shape(sizes, grouped=region.grouped)]
    if spec.columns and len(region.accs) == 2:  # each value twice: a pair's columns alternate
        pairs = put.reshape(node, [*shape, 1])
        pairs = put(aten.expand.default, pairs, [*[-1] * len(shape), 2])
        return put.reshape(pairs, [*shape[:-1], 2 * shape[-1]])
    if fake(node).dim() == len(shape) and (kind != "tile" or same(fake(node).shape[1], n)):
        return node
    return put.reshape(node, shape)


def _rewire_store(before: Node, region: Region, output: Node, nodes: list[Node]) -> None:
    """Let every node outside of the region that reads one of ``nodes`` (one value in several dtypes
    and shapes) read ``output`` instead. Two tensors share memory afterwards if they did before."""
    inside = {*region.values, *region.reduces}
    tensors: dict[Node, Node] = {}
    for node in nodes:
        put, tensor = Put(node, before), base(node)
        if tensor not in tensors:
            new, dtype = put.cast(output, fake(node).dtype), fake(node).dtype
            if new is output and any(fake(other).dtype == dtype for other in tensors):
                new = put(aten.clone.default, output)
            tensors[tensor] = new
        new = tensors[tensor]
        if not same(fake(node).shape, fake(new).shape):
            new = put(aten.view.default, new, _sizes(node, region))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)


def _finalize(put: Put, region: Region, by_name: dict[str, Node]) -> Node:
    """Insert the sum over partials of a reduction (rule R2), which is outside the kernel."""
    node, reduce = put.like, region.reduces[put.like]
    partials, source = by_name[reduce.name], node.all_input_nodes[0]
    along = -1 if reduce.axis == "row" else 0
    if reduce.combine == "logsumexp":
        new = put(row_logsumexp, partials)
    elif reduce.combine == "entropy":
        key, whole = (reduce.value, "logsumexp"), put.reshape(arguments(node)["lse"], [-1])
        lse = next(r for r in region.reduces.values() if (r.value, r.combine) == key)
        args = partials, by_name[lse.name], whole
        new = splice(put.before, reference.mixed_entropy, args, like=node)
    else:
        fold = aten.sum.dim_IntList if reduce.combine == "add" else aten.amax.default
        new = put(fold, partials, [along], True)
    if node.target is aten.mean.dim:
        new = put(aten.div.Tensor, new, region.shape[1])
    new = put.cast(new, fake(node).dtype)
    rank = fake(source).dim()
    keepdim = fake(node).dim() == rank
    if reduce.axis == "col":
        sizes = [1] * (rank - 1 if keepdim else 0) + [region.shape[1]]
    else:
        sizes = _sizes(source, region)[:-1] + ([1] if keepdim else [])
    return put(aten.view.default, new, sizes)


def _sizes(node: Node, region: Region) -> list[Any]:
    """The sizes of ``node`` as arguments of a view: numbers and one -1, or, if several sizes are
    symbolic, nodes (the arguments of the view that made the shape)."""
    shape = fake(node).shape
    symbolic = sum(isinstance(s, torch.SymInt) for s in shape)
    if not symbolic or (symbolic == 1 and not any(isinstance(s, int) and s == 0 for s in shape)):
        return [-1 if isinstance(s, torch.SymInt) else s for s in shape]
    for view in region.values:
        if op_name(view) == "view" and same(fake(view).shape, shape):
            return list(arguments(view)["size"])
    text = f"no view in the region makes the symbolic shape {tuple(shape)}"
    raise Refused(refuse("symbolic-shape", text))
