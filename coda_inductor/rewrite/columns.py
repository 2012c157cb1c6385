# SPDX-License-Identifier: Apache-2.0
"""The gradient of a packed projection is written part by part.

Before (queries, keys and values are slices of the columns of one product)::

    dz = pad(dq) + pad(dk) + pad(dv)          each as wide as dz, with zeros beside it

After::

    dz = columns(dq, dk, dv)

Why it is valid: each column of the sum has one term, or zero. Why it pays: ``semantic.columns``;
407 us a layer of Phi-3 mini (8192 tokens, H200), whose traffic takes 105.

Leaves alone: what no product reads; sums with gaps, overlaps or other terms; symbolic widths.
"""

import itertools

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import GEMMS, addends
from coda_inductor.graph.layout import relay
from coda_inductor.graph.nodes import aten, fake, is_erased, is_transpose, is_zeros, renames
from coda_inductor.graph.read import called
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import readers
from coda_inductor.record import Record
from coda_inductor.semantic.columns import COLUMNS, install


def write_columns(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to a joint graph, in place."""
    install()
    for total in reversed(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        parts = [] if is_erased(total) else _parts(total)
        users = readers(total, lambda n: renames(n) or is_transpose(n))[1] if len(parts) > 1 else ()
        if any(user.target in GEMMS for user in users):
            put, width = Put(total), fake(total).shape[-1]
            rows = [put.reshape(part, [-1, fake(part).shape[-1]]) for part in parts]
            parts = [put.reshape(put(COLUMNS, rows), [*put.sizes(parts[0])[:-1], width])]
        if len(parts) == 1 and relay(total, parts[0]) is None:
            prune([total])


def _parts(total: Node) -> list[Node]:
    """The columns of ``total`` from the left, if it is a sum of slices that lie in zeros; else
    empty. A slice without columns (what Phi-3 does not rotate) adds nothing."""
    found: dict[int, Node] = {}
    todo, whole = addends(total), fake(total)
    while todo:
        term = todo.pop()
        if len(term.users) == 1 and (pair := addends(term)):
            todo += pair
            continue
        start, part = _slice(term)
        width, rows = fake(part).shape[-1:], fake(part).shape[:-1]
        fixed = all(isinstance(n, int) for n in (*width, *whole.shape[-1:]))
        fits = fixed and same(rows, whole.shape[:-1]) and fake(part).dtype == whole.dtype
        if not fits or (0 not in width and start in found):
            return []
        found |= {} if 0 in width else {start: part}
    parts = [found[start] for start in sorted(found)]
    ends = itertools.accumulate(fake(part).shape[-1] for part in parts)
    return parts if [*sorted(found), *whole.shape[-1:]] == [0, *ends] else []


def _slice(term: Node) -> tuple[int, Node]:
    """The first column of a slice that lies in zeros, and the slice; (0, ``term``) for others."""
    if (call := called(term, "slice_scatter")) is not None:
        start, last = call["start"] or 0, call["dim"] % fake(term).dim() == fake(term).dim() - 1
        if is_zeros(call["input"]) and last and call["step"] == 1 and isinstance(start, int):
            return start % fake(term).shape[-1], call["source"]
    return 0, term
