# SPDX-License-Identifier: Apache-2.0
"""Views that our rewrites put in are of the kind that torch's partitioner computes again.

Before::

    flat = reshape(rstd, [-1, 1])          both are read in the backward pass

After::

    flat = view(rstd, [-1, 1])

Why: the partitioner knows ``aten.view`` for a view, not ``aten.reshape``, which a traced graph does
not hold. It then saves ``rstd`` and ``flat``, two tensors of one memory, and the backward pass may
write over one, its last reader done, while the other is still to be read: silently wrong gradients
(seen in GPT-2 on a CPU, torch 2.13).

Valid where the reshape needs no copy: certainly where its input is laid out row by row, else where
torch can view it so.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.nodes import aten, fake, row_major
from coda_inductor.record import Record


def reshapes_to_views(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to a joint or inference graph, in place."""
    for node in graph.nodes:
        if node.target is aten.reshape.default and _needs_no_copy(node):
            node.target = aten.view.default


def _needs_no_copy(node: Node) -> bool:
    tensor, shape = fake(node.args[0]), fake(node).shape
    if row_major(tensor):
        return True
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride(), *shape)):
        return False  # to ask would add a guard
    try:
        tensor.view(shape)
    except (RuntimeError, ValueError):  # a fake tensor raises the latter
        return False
    return True
