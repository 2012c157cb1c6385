# SPDX-License-Identifier: Apache-2.0
"""Torch is told the truth about views: which nodes are some, and whose memory they share.

Views that our rewrites put in are of the kind that torch's partitioner computes again.

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

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import storage, tree_leaves, tree_map
from coda_inductor.graph.edit import fake_mode
from coda_inductor.graph.nodes import aten, fake, may_view, row_major
from coda_inductor.record import Record


def reshapes_to_views(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to a joint or inference graph, in place."""
    for node in graph.nodes:
        if node.target is aten.reshape.default and _needs_no_copy(node):
            node.target = aten.view.default


def refresh_views(graph: Graph, _record: Record) -> None:
    """Let the recorded value of every view share memory with that of what it is a view of now.

    Where a node was replaced, the views of it keep the old one's. Torch reads from these values
    what it may write over: a saved tensor that an output is a view of must not look like its own.
    """
    for node in graph.nodes:
        if node.op == "call_function" and may_view(node) and node.all_input_nodes:
            refresh(node)


def refresh(view: Node) -> None:
    """The same for one node."""
    source, result = _storages(fake(view.all_input_nodes[0])), _storages(fake(view))
    if not result or result <= source:
        return
    mode = fake_mode(view.args)
    with contextlib.nullcontext() if mode is None else mode:
        args, kwargs = tree_map(fake, (view.args, dict(view.kwargs)))
        view.meta["val"] = view.target(*args, **kwargs)


def _needs_no_copy(node: Node) -> bool:
    tensor, shape = fake(node.all_input_nodes[0]), fake(node).shape
    if row_major(tensor):
        return True
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride(), *shape)):
        return False  # to ask would add a guard
    try:
        tensor.view(shape)
    except (RuntimeError, ValueError):  # a fake tensor raises the latter
        return False
    return True


def _storages(value: Any) -> set[int]:
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    strided = [t for t in tensors if t.layout == torch.strided]
    return {storage(t) for t in strided}
