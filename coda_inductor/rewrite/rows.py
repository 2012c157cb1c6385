# SPDX-License-Identifier: Apache-2.0
"""A residual stream that lies in memory column by column is copied once, where it begins.

Before (patches of a picture: a convolution, whose channels become columns)::

    x = permute(flatten(conv(picture)), [0, 2, 1])               # strides (.., 1, N)
    x = x + a @ Wa;  x = x + b @ Wb;  ...                        # strides as the first x has them

After::

    x = clone(permute(...), memory_format=torch.contiguous_format)
    x = x + a @ Wa;  x = x + b @ Wb;  ...                        # row by row

Why it is valid: no value changes, and strides are recorded anew for all that is computed from x.

What it enables: epilogues store results row by row, so that they cannot compute such sums.

Leaves alone: tensors that fewer than two norms read, because a copy would not pay; streams whose
strides a caller would see.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import tree_leaves
from coda_inductor.graph.edit import Put, evaluate, replace
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sizes import same, same_strides
from coda_inductor.record import Record
from coda_inductor.semantic.norms import NORMS


def lay_out_rows(graph: Graph, _record: Record) -> None:
    """Copy the streams of an aten graph that norms read, in place."""
    norms = [n for n in graph.nodes if n.target in NORMS]
    for start, times in Counter(_start(arguments(norm)["x"]) for norm in norms).items():
        if start is not None and times > 1:
            _copy(start)


def _start(x: Node | None) -> Node | None:
    """The transpose of which ``x`` has the strides, if it does not lie row by row; else None."""
    while x is not None and not _by_rows(x) and x.target is not aten.permute.default:
        inputs = [n for n in x.all_input_nodes if isinstance(fake(n), torch.Tensor)]
        alike = (n for n in inputs if same(fake(n).shape, fake(x).shape) and not _by_rows(n))
        x = next(alike, None)
    return None if x is None or _by_rows(x) else x


def _by_rows(x: Node) -> bool:
    return same(fake(x).stride()[-1], 1) or same(fake(x).shape[-1], 1)


def _copy(start: Node) -> None:
    put = Put(start, start.next)
    copy = put(aten.clone.default, start, memory_format=torch.contiguous_format)
    replace(start, copy)
    before, node = {copy: fake(copy)}, copy.next
    while node.op != "output":
        if node.op == "call_function" and not before.keys().isdisjoint(node.all_input_nodes):
            value = evaluate(node.target, node.args, node.kwargs, like=node)
            if not _same_strides(value, fake(node)):
                before[node], node.meta["val"] = fake(node), value
        node = node.next
    if not before.keys().isdisjoint(node.all_input_nodes):
        for changed, value in before.items():
            changed.meta["val"] = value
        replace(copy, start)


def _same_strides(new: object, old: object) -> bool:
    pairs = zip(tree_leaves(new), tree_leaves(old), strict=True)
    return all(same_strides(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
