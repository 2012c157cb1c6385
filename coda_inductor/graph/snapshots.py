# SPDX-License-Identifier: Apache-2.0
"""Save a graph, and restore it."""

from torch.fx import Graph, Node


def snapshot(graph: Graph) -> Graph:
    """A copy of ``graph``, the meta of its nodes included, for :func:`restore`."""
    copy = Graph()
    output = copy.output(copy.graph_copy(graph, {}))
    output.meta = dict(graph.output_node().meta)
    return copy


def restore(graph: Graph, copy: Graph) -> None:
    """Restore the state of ``graph`` at ``copy = snapshot(graph)``, from any state: within a pass,
    nodes may be placed before their inputs. Placeholders stay the same nodes, because torch keeps
    more about them than their meta; placeholders that a pass added are erased."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    others = [n for n in graph.nodes if n.op != "placeholder"]
    for node in others:
        node.args, node.kwargs = (), {}
    for node in others:
        graph.erase_node(node)
    env: dict[Node, Node] = {}
    olds = list(copy.find_nodes(op="placeholder"))
    for added in inputs[len(olds) :]:
        graph.erase_node(added)
    for old, node in zip(olds, inputs, strict=False):
        node.meta = dict(old.meta)
        env[old] = node
    output = graph.output(graph.graph_copy(copy, env))
    output.meta = dict(copy.output_node().meta)
