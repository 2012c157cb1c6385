# SPDX-License-Identifier: Apache-2.0
"""Save a graph, and restore it."""

from __future__ import annotations

from torch.fx import Graph, Node


def snapshot(graph: Graph) -> Graph:
    """A copy of ``graph``, the meta of its nodes included, for :func:`restore`."""
    copied = Graph()
    output = copied.output(copied.graph_copy(graph, {}))
    output.meta = dict(graph.output_node().meta)
    return copied


def restore(graph: Graph, kept: Graph) -> None:
    """Restore ``graph`` to what it was at ``kept = snapshot(graph)``, from any state: in the middle
    of a pass, nodes may be placed before their inputs. Placeholders stay the same nodes, because
    torch keeps more about them than their meta; those that a pass added are erased."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    others = [n for n in graph.nodes if n.op != "placeholder"]
    for node in others:
        node.args, node.kwargs = (), {}
    for node in others:
        graph.erase_node(node)
    known: dict[Node, Node] = {}
    olds = list(kept.find_nodes(op="placeholder"))
    for added in inputs[len(olds) :]:
        graph.erase_node(added)
    for old, node in zip(olds, inputs, strict=False):
        node.meta = dict(old.meta)
        known[old] = node
    output = graph.output(graph.graph_copy(kept, known))
    output.meta = dict(kept.output_node().meta)
