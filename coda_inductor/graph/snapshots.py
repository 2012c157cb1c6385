# SPDX-License-Identifier: Apache-2.0
"""Put an aten graph back as it was; recorded values of views."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import storage, tree_leaves, tree_map
from coda_inductor.graph.edit import _fake_mode
from coda_inductor.graph.nodes import _views, fake


def refresh_views(graph: Graph) -> None:
    """Let the recorded value of every view share memory with that of what it is a view of now.

    Where a node was replaced, the views of it keep the old one's. Torch reads from these values
    what it may write over: a saved tensor that an output is a view of must not look like its own.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not _views(node) or not node.args:
            continue
        source, result = _storages(fake(node.args[0])), _storages(fake(node))
        if not result or result <= source:
            continue
        mode = _fake_mode(node.args)
        with mode if mode is not None else contextlib.nullcontext():
            arguments = tree_map(fake, (node.args, dict(node.kwargs)))
            node.meta["val"] = node.target(*arguments[0], **arguments[1])


def _storages(value: Any) -> set[int]:
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    strided = [t for t in tensors if t.layout == torch.strided]
    return {storage(t) for t in strided}


def snapshot(graph: Graph) -> Graph:
    """A copy of ``graph``, the meta of its nodes included, for :func:`restore`."""
    copied = Graph()
    output = copied.output(copied.graph_copy(graph, {}))
    output.meta = dict(graph.output_node().meta)
    return copied


def restore(graph: Graph, kept: Graph) -> None:
    """Make ``graph`` again what it was at ``kept = snapshot(graph)``, whatever state it is in:
    between two steps of a pass nodes may stand in front of what they read. Placeholders, which no
    pass of ours touches, stay the nodes they are: torch keeps more of them than their meta."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    others = [n for n in graph.nodes if n.op != "placeholder"]
    for node in others:
        node.args, node.kwargs = (), {}
    for node in others:
        graph.erase_node(node)
    known: dict[Node, Node] = {}
    for old, node in zip(kept.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta = dict(old.meta)
        known[old] = node
    output = graph.output(graph.graph_copy(kept, known))
    output.meta = dict(kept.output_node().meta)
