# SPDX-License-Identifier: Apache-2.0
"""What is computed in 32 bits from one tensor of 16 is computed anew for each of its readers.

Before::

    p = float(dy) * gamma; c = mean(p * n, -1); dx = r * (p - n * c)

After::

    p = float(dy) * gamma; c = mean(p * n, -1)
    p' = float(dy) * gamma; dx = r * (p' - n * c)

Why it is valid: the same op of the same operands. Why it pays: where an epilogue takes p for the
sum, the other reader makes it stored, in 32 bits; that reader then computes it for free from dy,
which is stored in 16 (``fuse.stores``). Inductor would compute it in both of its kernels anyway.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from coda_inductor.fuse.stores import widened
from coda_inductor.record import Record


def compute_for_each(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to every such node that has several readers, in place."""
    for node in list(graph.nodes):
        if len(node.users) > 1 and widened(node):
            for user in list(node.users)[1:]:
                with graph.inserting_before(user):
                    user.replace_input_with(node, _again(graph, node))


def _again(graph: Graph, node: Node) -> Node:
    return graph.node_copy(node, lambda argument: argument)
