# SPDX-License-Identifier: Apache-2.0
"""Compute sines and cosines that multiply many larger tensors only once.

Before::

    q2 = q * cos(angles) + ...;  k2 = k * cos(angles) + ...        in every layer, and backward

After::

    c = keep(cos(angles)); q2 = q * c + ...;  k2 = k * c + ...

Why: each kernel that reads a table of positions computes it again, the sine of a large angle per
value, in each head of each layer. The gradient of queries and keys of a Llama layer took 342 us on
an H100, and its traffic takes 40.

A table is kept only if tensors of at least ``LEAST_READS`` times its size read it, its views, casts
and copies apart. Ops across columns that an epilogue may absorb (``rewrite.heads``) have their own
tables: one that is not absorbed is decomposed, and the pass, which then runs again, sees its reads.
"""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.compat import tree_leaves
from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.nodes import aten, fake, is_cast, renames_or_casts
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import may_move, only_reader, readers
from coda_inductor.record import Record
from coda_inductor.semantic.define import CROSSING, opaque

LEAST_READS = 8

#: A copy that compilers do not look into.
KEEP = opaque("keep(Tensor x) -> Tensor", torch.clone, torch.empty_like)
_SLOW = (aten.sin.default, aten.cos.default)


def keep_tables(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to a joint or inference graph, in place."""
    for node in [n for n in graph.nodes if n.target in _SLOW]:
        table = _end(node)
        if table.target is not KEEP and _is_shared(table):
            replace(table, Put(table, table.next)(KEEP, table))


def _end(node: Node) -> Node:
    """The last cast, scaling or view that all readers of ``node`` go through; or its kept copy."""
    while (user := only_reader(node)) is not None and node.target is not KEEP:
        scales = user.target is aten.mul.Tensor and len(user.all_input_nodes) == 1
        if not (scales or renames_or_casts(user) or user.target is KEEP):
            break
        node = user
    return node


def _is_shared(table: Node) -> bool:
    elements = hint(fake(table).numel())
    _, users = readers(table, lambda n: may_move(n) or is_cast(n))
    results = [tree_leaves(fake(user)) for user in users if user.target not in CROSSING]
    sizes = [[hint(x.numel()) for x in xs if isinstance(x, Tensor)] for xs in results]
    largest = [max(each, default=0) for each in sizes]
    return sum(largest) >= LEAST_READS * elements and max(largest, default=0) > elements
