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

from collections.abc import Container, Iterable

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
    forward = [n for n in graph.nodes if n in scope.forward]
    read = [n for n in forward if _backward_readers(n, scope)]
    for node in graph.nodes:
        if node.target is row_logsumexp:
            logits = node.all_input_nodes[0]
            source(logits).meta[NO_RECOMPUTE] = logits.meta[NO_RECOMPUTE] = True
    derivable = _derivable(forward, {source(n) for n in read})
    copies: dict[Node, Node] = {}
    for node in read:
        if node in derivable:
            for user in _backward_readers(node, scope):
                if not _compares(user, scope):
                    user.replace_input_with(node, _copy(graph, node, derivable, copies, first))
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


def _derivable(nodes: Iterable[Node], read: set[Node]) -> set[Node]:
    """Which of ``nodes``, inputs first, should be computed from other tensors that the backward
    pass has (``read``), and from no more than it should read."""
    derivable: set[Node] = set()
    bases: dict[Node, frozenset[Node] | None] = {}  # the tensors that each is computed from, if any
    for node in nodes:
        computed = node.target in LOWERINGS or renames_or_casts(node)
        needed = [bases[n] for n in node.all_input_nodes]
        union = frozenset[Node]().union(*filter(None, needed))
        known = needed and None not in needed and len(union) <= _MOST_TENSORS
        if _is_vector(node):
            bases[node] = frozenset()
        elif computed and known and not node.meta.get(NO_RECOMPUTE):
            derivable.add(node)
            bases[node] = union
        else:  # Not every input: it may be changed in place before the backward pass.
            bases[node] = frozenset({node}) if source(node) in read else None
    return derivable


def _is_vector(node: Node) -> bool:
    """Does ``node`` have one value per row or column? Recomputing such a vector saves little."""
    value = fake(node)
    return hasattr(value, "shape") and (len(value.shape) < 2 or value.shape[-1] == 1)


def _copy(
    graph: Graph, node: Node, derivable: Container[Node], copies: dict[Node, Node], before: Node
) -> Node:
    """Compute ``node`` again before ``before``, and all ``derivable`` nodes that it is computed
    from. Returns the copy."""
    nodes = closure([node], lambda n: [i for i in n.all_input_nodes if i in derivable])
    for origin in sorted(nodes.keys() - copies.keys()):
        with graph.inserting_before(before):
            new = graph.node_copy(origin, lambda n: copies.get(n, n) if n in derivable else n)
        tags = ("recompute", "ac_graph_id", "partitioner_tag")
        new.meta = {key: value for key, value in origin.meta.items() if key not in tags}
        if "partitioner_tag" in before.meta:
            new.meta["partitioner_tag"] = before.meta["partitioner_tag"]
        copies[origin] = new
    return copies[node]
