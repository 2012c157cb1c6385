# SPDX-License-Identifier: Apache-2.0
"""Torch is told whose memory views share: it reads from their recorded values what it may write
over."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from coda_inductor.compat import storage, tree_leaves
from coda_inductor.graph.edit import computed
from coda_inductor.graph.nodes import fake, may_view
from coda_inductor.record import Record


def refresh_views(graph: Graph, _record: Record) -> None:
    """Let the recorded value of every view share memory with that of what it is a view of now.

    Where a node was replaced, the views of it keep the old one's: a saved tensor that an output is
    a view of would look like its own.
    """
    for node in graph.nodes:
        if node.op == "call_function" and may_view(node) and node.all_input_nodes:
            source, result = _storages(fake(node.all_input_nodes[0])), _storages(fake(node))
            if not result <= source:
                node.meta["val"] = computed(node.target, node.args, node.kwargs, like=node)


def _storages(value: Any) -> set[int]:
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {storage(t) for t in tensors if t.layout == torch.strided}
