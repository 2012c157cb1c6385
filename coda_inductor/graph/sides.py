# SPDX-License-Identifier: Apache-2.0
"""Does a node of a joint graph belong to the forward or to the backward pass?

A joint graph computes the outputs and the gradients in one; torch splits it after us. A fused site
must lie on one side, or the forward pass would wait for a gradient. The side depends on the *use*
of a node, not on its position: ``silu'(g)`` depends on forward values only and yet belongs to the
backward pass, because no output needs it. Inference graphs are all forward.
"""

import functools
import heapq
import operator
from collections.abc import Iterable

from torch.fx import Graph, Node

from coda_inductor.graph.edit import insertions
from coda_inductor.graph.gemms import GEMMS
from coda_inductor.graph.nodes import is_erased
from coda_inductor.graph.walk import closure

#: Meta key of a node that the forward pass computes although none of its outputs needs the result,
#: because it is small and costs nothing there.
EARLY = "coda_early"
#: torch's tag of a write that the forward pass makes, which may stand at the end of the graph.
FORWARD_WRITE = "must_be_in_forward"


class Scope:
    """The side (forward or backward) of each node of one graph.

    Attributes:
        forward: the nodes that some output of the forward pass needs, or a buffer or input that it
            writes to, or that are ``EARLY``.
        graded: the nodes that depend on a tangent, a gradient of an output.
        eager: must epilogues round as eager's ops do?
    """

    def __init__(self, graph: Graph, *, eager: bool = False):
        self.eager = eager
        self.forward: set[Node] = set()
        self.graded: set[Node] = set()
        self._put = insertions(graph)
        self._count = len(self._put)
        #: The products that a node is computed from, as bits: DFS of each pair would take n**2.
        self._above: dict[Node, int] = {}
        self._bits: dict[Node, int] = {}
        for node in graph.nodes:
            self._grade(node)
        early = (n for n in graph.nodes if n.meta.get(EARLY) and n not in self.graded)
        outputs = [n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes]
        outputs += [n for n in graph.nodes if n.meta.get("partitioner_tag") == FORWARD_WRITE]
        roots = [*early, *(n for n in outputs if n not in self.graded)]
        self.forward = set(closure(roots, lambda node: node.all_input_nodes))
        for node in graph.nodes:  # a fused forward site also returns what only the backward reads
            if node.target is operator.getitem and node.all_input_nodes[0] in self.forward:
                self.forward.add(node)

    def refresh(self) -> None:
        """Add the nodes that a pass has inserted. A node that depends only on forward values
        belongs to the forward pass, unless one of its inputs is recomputed."""
        new = sorted(node for node in self._put[self._count :] if not is_erased(node))
        self._count = len(self._put)
        for node in new:
            self._grade(node)
            if node not in self.graded and not any(map(self.recomputed, node.all_input_nodes)):
                self.forward.add(node)
        todo = list(new)
        while todo:  # what reads new nodes may depend on more products than before
            node = heapq.heappop(todo)
            before = self._above.pop(node, None)
            after = self._above[node] = self.products(node) | (before or 0)
            if before != after:
                for user in node.users:
                    if user in self._above:
                        heapq.heappush(todo, user)

    def depends(self, node: Node, products: Iterable[Node]) -> bool:
        """Is ``node`` one of ``products``, GEMMs of the graph, or computed from one?"""
        bits = [self.products(product) and self._bits[product] for product in products]
        return bool(self.products(node) & functools.reduce(operator.or_, bits))

    def replace(self, product: Node, new: Node) -> None:
        """Let ``new``, a product, take the place of ``product``: the same nodes depend on it."""
        if product in self._bits:
            self._bits[new] = self._bits[product]

    def products(self, node: Node) -> int:
        """A bit mask of the GEMMs that ``node`` is computed from, itself included."""
        table, todo = self._above, [node]
        while todo:
            top = todo[-1]
            if missing := [n for n in top.all_input_nodes if n not in table and top not in table]:
                todo += missing
                continue
            todo.pop()
            if top not in table:
                bits = 0
                if top.target in GEMMS:
                    bits = self._bits.setdefault(top, 1 << len(self._bits))
                above = (table[n] for n in top.all_input_nodes)
                table[top] = functools.reduce(operator.or_, above, bits)
        return table[node]

    def same_side(self, left: Node, right: Node) -> bool:
        return (left in self.forward) == (right in self.forward)

    def recomputed(self, node: Node) -> bool:
        """Is ``node`` computed in the backward pass from forward values only?"""
        outside = node in self.forward or node in self.graded
        return node.op == "call_function" and not outside

    def _grade(self, node: Node) -> None:
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
