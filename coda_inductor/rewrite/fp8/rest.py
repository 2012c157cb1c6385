# SPDX-License-Identifier: Apache-2.0
"""FP8 after fusing: maxima of columns that no epilogue took are read together with those of rows,
and products that stayed unfused are given their scales, where cuBLAS multiplies with them.

Before::

    m = abs(x); r = amax(m, 1); c = amax(m, 0)
    p = scaled_mm(q, r, 1 / s, 1 / t, bfloat16, fast, after=True)    _scaled_mm(q, r, one, one)
                                                                     bfloat16(... * (1 / s * 1 / t))
After::

    rows, cols = fp8_amax(x, None, True, True); r = amax(rows, 1); c = amax(cols, 0)
    p = scaled_mm(q, r, 1 / s, 1 / t, bfloat16, fast, after=False)   _scaled_mm(q, r, 1 / s, 1 / t)

Why it is valid: a maximum of maxima, of the same numbers; the same product, rounded once instead of
twice. Why it pays: a reduction over columns is a kernel of its own in Inductor, which reads x once
more (rows alone stay: the kernel that makes x makes their maxima too). torchao multiplies after the
product for the sake of a kernel that was slow with scales of rows; cuBLAS's, for bfloat16 alone,
takes 3 % longer with them than without (docs/gotchas.md), and the multiplication reads and writes
the product once more.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import multiplies_after
from coda_inductor.graph.nodes import aten, fake
from coda_inductor.mainloop.availability import scales_vectors
from coda_inductor.record import Record
from coda_inductor.rewrite.fp8.scales import COLUMN, MAXIMA, ROW
from coda_inductor.runtime.fp8_casts import AMAX
from coda_inductor.semantic.fp8 import scaled_mm


def finish_fp8(graph: Graph, record: Record) -> None:
    """Apply both, in place; the second where kernels run on a GPU that can."""
    _read_columns_once(graph)
    for node in graph.find_nodes(op="call_function", target=scaled_mm):
        half = record.policy.compiles and fake(node).dtype == torch.bfloat16
        if half and multiplies_after(node) and scales_vectors(record.as_if or fake(node).device):
            node.update_arg(6, False)


def _read_columns_once(graph: Graph) -> None:
    """Every tensor that ``scales`` meant for an epilogue."""
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
