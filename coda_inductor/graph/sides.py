# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a joint graph belong to the forward pass and which to the backward.

A joint graph computes the outputs and the gradients in one; torch splits it after us. A fused
site must lie on one side, or the forward pass would wait for a gradient. The side depends on what a
node is *for*, not on its place: ``silu'(g)`` depends on forward values only and yet belongs to the
backward pass, because no output needs it. Inference graphs are all forward.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from coda_inductor.graph.walk import closure

#: Meta key of a node that the forward pass computes although none of its outputs needs the result,
#: because it is small and costs nothing there.
EARLY = "coda_early"


class Scope:
    """The sides of one graph's nodes.

    Attributes:
        forward: the nodes that some output of the forward pass needs, or that are ``EARLY``.
        graded: the nodes that depend on a tangent, a gradient of an output.
    """

    def __init__(self, graph: Graph):
        self.forward: set[Node] = set()
        self.graded: set[Node] = set()
        self._known: set[Node] = set()
        for node in graph.nodes:
            self._grade(node)
        early = (n for n in graph.nodes if n.meta.get(EARLY) and n not in self.graded)
        outputs = [n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes]
        needed = [*early, *(n for n in outputs if n not in self.graded)]
        self.forward = set(closure(needed, lambda node: node.all_input_nodes))
        for node in graph.nodes:  # a fused forward site also returns what only the backward reads
            if node.target is operator.getitem and node.all_input_nodes[0] in self.forward:
                self.forward.add(node)

    def refresh(self, graph: Graph) -> None:
        """Add the nodes that a pass has inserted. One that depends on forward values alone belongs
        to the forward pass, unless one of its inputs is recomputed."""
        for node in graph.nodes:
            if node in self._known:
                continue
            self._grade(node)
            if node not in self.graded and not any(map(self.recomputed, node.all_input_nodes)):
                self.forward.add(node)

    def same_side(self, left: Node, right: Node) -> bool:
        return (left in self.forward) == (right in self.forward)

    def recomputed(self, node: Node) -> bool:
        """Is ``node`` computed in the backward pass from forward values alone?"""
        outside = node in self.forward or node in self.graded
        return node.op == "call_function" and not outside

    def _grade(self, node: Node) -> None:
        self._known.add(node)
        if is_tangent(node) or any(n in self.graded for n in node.all_input_nodes):
            self.graded.add(node)


def is_tangent(node: Node) -> bool:
    """Is ``node`` the gradient of an output, an input of a joint or backward graph?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def training(graph: Graph) -> bool:
    """Does ``graph`` compute gradients?"""
    return any(map(is_tangent, graph.nodes))


def checkpoint(node: Node) -> tuple:
    """The activation checkpoint of ``node``, and whether it is recomputed there. A fused site lies
    in one checkpoint, so that recomputation follows the user's policy exactly."""
    return node.meta.get("ac_graph_id"), node.meta.get("recompute")
