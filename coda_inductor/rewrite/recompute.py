# SPDX-License-Identifier: Apache-2.0
"""Let the backward pass recompute the elementwise results of the forward pass that it reads.

Before::

    s = silu(g); a = s * u                  forward; g and u are results of GEMMs
    du = da * s;  dWd = dx.T @ a            backward

After::

    s2 = silu(g); a2 = s2 * u               in the backward pass
    du = da * s2; dWd = dx.T @ a2

Why it is valid: the same function of the same values. Why it pays: g and u must be kept for the
derivative anyway, so the forward pass keeps nothing else, and the epilogue that loads them for the
derivative computes s2 and a2 for free. Without fusion, torch's partitioner merges the copies with
the originals again (it eliminates common subexpressions first), and decides as usual.

Refuses: values that cannot be computed from at most two tensors that the backward pass reads
anyway; values that the norm rewrite keeps on purpose (the operand of the GEMMs after a norm); and
values for which another rounding is harmful: logits, because ``exp(x - logsumexp(x)) - 1`` is
nearly zero; others of which a row's log-sum-exp is subtracted; and values that are compared for
equality, as in the gradient of a maximum (``x == x.amax(-1)``).
"""

from torch.fx import Graph, Node

from coda_inductor.compat import stable_topological_sort
from coda_inductor.graph.nodes import aten, fake, renames_or_casts
from coda_inductor.graph.sides import Scope, is_tangent
from coda_inductor.graph.vocabulary import LOWERINGS
from coda_inductor.graph.walk import closure, source
from coda_inductor.record import Record
from coda_inductor.semantic.loss import row_logsumexp

#: Meta key of a node that the forward pass stores and the backward pass must not recompute.
NO_RECOMPUTE = "coda_keep"

_MOST_TENSORS = 2
_EQUALITY = (aten.eq.Tensor, aten.ne.Tensor)


def recompute_in_backward(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to the whole joint graph, in place; inference graphs stay as they are."""
    scope = Scope(graph)
    first = next((n for n in graph.nodes if n in scope.graded and not is_tangent(n)), None)
    if first is None:
        return
    read = [n for n in graph.nodes if n in scope.forward and _backward_readers(n, scope)]
    for node in graph.nodes:
        if node.target is row_logsumexp:
            logits = node.all_input_nodes[0]
            source(logits).meta[NO_RECOMPUTE] = logits.meta[NO_RECOMPUTE] = True
    bases = _Bases({source(n) for n in read})
    for node in graph.nodes:  # inputs first, so that nothing recurses once a node
        if node in scope.forward:
            bases.bases(node)
    copies: dict[Node, Node] = {}
    for node in read:
        if bases.derivable(node):
            for user in _backward_readers(node, scope):
                if _compares(user, scope):
                    continue
                user.replace_input_with(node, _copy(graph, node, bases, copies, first))
    stable_topological_sort(graph)  # readers that need no tangent may be before the copies


def _backward_readers(node: Node, scope: Scope) -> list[Node]:
    return [u for u in node.users if u.op == "call_function" and u not in scope.forward]


def _compares(node: Node, scope: Scope) -> bool:
    """Does ``node``, or a backward node computed from it and forward values, test equality, or is
    it ``exp(x - y)`` with one y a row?"""
    nodes = closure([node], lambda n: n.users if scope.recomputed(n) else ())
    differences = [source(n.all_input_nodes[0]) for n in nodes if n.target is aten.exp.default]
    return any(n.target in _EQUALITY for n in nodes) or any(
        n.target is aten.sub.Tensor and any(map(_is_vector, n.all_input_nodes)) for n in differences
    )


class _Bases:
    """The tensors that a forward value is computed from and the backward pass reads."""

    def __init__(self, read: set[Node]):
        self.read = read
        self.cache: dict[Node, frozenset[Node] | None] = {}

    def derivable(self, node: Node) -> bool:
        """Should ``node`` be computed from other tensors that the backward pass has?"""
        return self._inputs(node) is not None

    def _inputs(self, node: Node) -> frozenset[Node] | None:
        """The tensors that ``node`` would be computed from. None if it should not be recomputed, or
        if they are more than the backward pass should read."""
        computed = node.target in LOWERINGS or renames_or_casts(node)
        if not computed or _is_vector(node) or node.meta.get(NO_RECOMPUTE):
            return None
        inputs = [self.bases(n) for n in node.all_input_nodes]
        if not inputs or any(f is None for f in inputs):
            return None
        union = frozenset().union(*(f for f in inputs if f is not None))
        return union if len(union) <= _MOST_TENSORS else None

    def bases(self, node: Node) -> frozenset[Node] | None:
        """The tensors to compute ``node``, which others need, from; it may be read too. Or None."""
        if node not in self.cache:
            result = frozenset[Node]() if _is_vector(node) else self._inputs(node)
            # Not every input: it may be changed in place before the backward pass.
            if result is None and source(node) in self.read:
                result = frozenset({node})
            self.cache[node] = result
        return self.cache[node]


def _is_vector(node: Node) -> bool:
    """Does ``node`` have one value per row or column? Recomputing such a vector saves little."""
    value = fake(node)
    return hasattr(value, "shape") and (len(value.shape) < 2 or value.shape[-1] == 1)


def _copy(graph: Graph, node: Node, bases: _Bases, copies: dict[Node, Node], before: Node) -> Node:
    """Compute ``node`` again before ``before``, from its bases. Returns the copy."""
    nodes = closure([node], lambda n: [i for i in n.all_input_nodes if bases.derivable(i)])
    for origin in sorted(nodes.keys() - copies.keys()):
        with graph.inserting_before(before):
            new = graph.node_copy(origin, lambda n: copies.get(n, n) if bases.derivable(n) else n)
        tags = ("recompute", "ac_graph_id", "partitioner_tag")
        new.meta = {key: value for key, value in origin.meta.items() if key not in tags}
        if "partitioner_tag" in before.meta:
            new.meta["partitioner_tag"] = before.meta["partitioner_tag"]
        copies[origin] = new
    return copies[node]
