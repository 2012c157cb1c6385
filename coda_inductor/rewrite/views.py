# SPDX-License-Identifier: Apache-2.0
"""Let recorded values of views share memory like the views, because torch reads from them which
memory it may overwrite."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from coda_inductor.compat import storage, tree_leaves
from coda_inductor.graph.edit import evaluate
from coda_inductor.graph.nodes import fake, may_view
from coda_inductor.record import Record


def refresh_views(graph: Graph, _record: Record) -> None:
    """Let the recorded value of every view share memory with its present base's value.

    After a node is replaced, its views still share memory with the old node's value: if an output
    is a view of a saved tensor, the two would look independent.
    """
    for node in graph.nodes:
        if node.op == "call_function" and may_view(node) and node.all_input_nodes:
            source, result = _storages(fake(node.all_input_nodes[0])), _storages(fake(node))
            if not result <= source:
                node.meta["val"] = evaluate(node.target, node.args, node.kwargs, like=node)


def _storages(value: Any) -> set[int]:
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return {storage(t) for t in tensors if t.layout == torch.strided}
