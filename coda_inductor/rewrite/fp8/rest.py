# SPDX-License-Identifier: Apache-2.0
"""Maxima of columns that no epilogue took are read together with those of rows.

Before::

    m = abs(x); r = amax(m, 1); c = amax(m, 0)          what is left after fusing

After::

    rows, cols = fp8_amax(x, None, True, True); r = amax(rows, 1); c = amax(cols, 0)

Why it is valid: a maximum of maxima, of the same numbers. Why it pays: a reduction over columns is
a kernel of its own in Inductor, which reads x once more. Rows alone stay: the kernel that makes x
makes their maxima too.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import aten, fake
from coda_inductor.record import Record
from coda_inductor.rewrite.fp8.scales import COLUMN, MAXIMA, ROW
from coda_inductor.runtime.fp8_casts import AMAX


def read_columns_once(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to every tensor that ``scales`` meant for an epilogue, in place."""
    for magnitude in graph.find_nodes(op="call_function", target=aten.abs.default):
        if not magnitude.meta.get(MAXIMA):
            continue
        left = {tuple(user.args[1]): user for user in magnitude.users if _is_maximum(user)}
        if COLUMN not in left or len(left) < len(magnitude.users):
            continue
        put = Put(graph, like=magnitude)
        with graph.inserting_before(magnitude):
            parts = put(AMAX, magnitude.args[0], None, ROW in left, True)
            for dims, old in left.items():
                part = put(operator.getitem, parts, 1 - dims[0])
                new = put.cast(put(aten.amax.default, part, list(dims), True), fake(old).dtype)
                old.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def _is_maximum(node: Node) -> bool:
    return node.target is aten.amax.default and tuple(node.args[1]) in (ROW, COLUMN)
