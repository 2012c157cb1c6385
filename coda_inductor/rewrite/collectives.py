# SPDX-License-Identifier: Apache-2.0
"""Merge equal collectives, and the collectives of the terms of a sum.

Tensor parallelism per module (``parallelize_module``) gathers one norm's result separately for gate
and up, or for q, k and v, and reduces each of their gradients separately.

Before::

    n1 = wait(all_gather(n)); n2 = wait(all_gather(n)); g = n1 @ Wg; u = n2 @ Wu
    dn = wait(reduce_scatter(dg @ Wg.T)) + wait(reduce_scatter(du @ Wu.T))

After::

    n1 = wait(all_gather(n)); g = n1 @ Wg; u = n1 @ Wu
    dn = wait(reduce_scatter(dg @ Wg.T + du @ Wu.T))

and the same with ``all_reduce``.

Why it is valid: a functional collective is a function of its arguments, and the sum over ranks is
linear. Every rank of a group runs the same program, so each rank drops the same collectives: the
decision may depend only on the graph and options (not on the gate, a measurement or the device).

What it enables: gate and up read one operand and can share a tile (torch merges equal gathers too,
but after us), and one GEMM adds up the gradients' products. In the backward pass, two fifths of the
data are sent. The sum is rounded once.

Refuses, silently: nodes on both sides of a joint graph or of a checkpoint's border; a result that
is a graph output; a term with other readers; reductions other than sums and means; sums, with
Inductor's asynchronous tensor parallelism, which needs one product per collective.
"""

import operator
from typing import Any

from torch.fx import Graph, Node

from coda_inductor.compat import micro_pipeline, wait_tensor
from coda_inductor.graph.collectives import COLLECTIVES, SUMS, is_wait, moves
from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import addends
from coda_inductor.graph.nodes import arguments, aten, fake, renames
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, leaves, parts
from coda_inductor.record import Record


def merge_collectives(graph: Graph, record: Record) -> None:
    """Apply the rewrite wherever it is valid, in place; counts each collective that is saved."""
    present = any(node.target in COLLECTIVES for node in graph.nodes)
    if not present or not record.enabled("collective"):
        return
    scope = Scope(graph)
    saved = _merge_equal(graph, scope)
    for node in [] if micro_pipeline() else list(graph.nodes):
        if addends(node) and _merge_sum(node, scope):
            scope.refresh()
            saved += 1
    record.fire("collective", saved)


def _merge_equal(graph: Graph, scope: Scope) -> int:
    """Keep only the first of equal collectives, of their waits, and of moves of their results.
    Returns the number of erased collectives."""
    first: dict[tuple[Any, ...], Node] = {}
    copies: list[Node] = []
    chain: set[Node] = set()  # collectives, and what only moves their results
    for node in graph.nodes:
        if node.target not in COLLECTIVES and not (moves(node) and chain & {*node.all_input_nodes}):
            continue
        chain.add(node)
        call = node.target, str(node.args), str(node.kwargs)  # nodes' names are unique
        side = node in scope.forward, scope.recomputed(node), checkpoint(node)
        original = first.setdefault((*call, *side), node)
        waits = filter(is_wait, node.users)
        if original is not node and not any(map(leaves, (node, *waits))):
            node.replace_all_uses_with(original)
            copies.append(node)
    saved = sum(node.target in COLLECTIVES for node in copies)
    for node in reversed(copies):
        graph.erase_node(node)
    return saved


def _merge_sum(total: Node, scope: Scope) -> bool:
    """Replace ``total``: add first, then reduce over ranks. Returns whether that was possible."""
    names = [_sole_wait(term) for term in addends(total)]
    waits = [term for term in names if term is not None]
    if len(waits) < 2 or not same(*(fake(wait).shape for wait in waits)):
        return False
    left, right = (wait.all_input_nodes[0] for wait in waits)
    if left.target not in SUMS or left.target is not right.target:
        return False
    options = [arguments(side) for side in (left, right)]
    terms = [o.pop("input") for o in options]
    if options[0] != options[1] or options[0]["reduce_op"] not in ("sum", "avg"):
        return False
    same_place = scope.same_side(left, right) and checkpoint(left) == checkpoint(right)
    if not same_place or len(left.users) > 1 or len(right.users) > 1:
        return False
    if fake(terms[0]).dtype != fake(terms[1]).dtype or fake(total).dtype != fake(left).dtype:
        return False
    put = Put(total)
    reduced = Put(left, total)(left.target, _add(put, *terms), **options[0])
    result = Put(waits[0], total)(wait_tensor, reduced)
    if not same(fake(result).shape, fake(total).shape):
        result = put.reshape(result, put.sizes(total))
    total.replace_all_uses_with(result)
    prune([total], lambda n: n.is_impure() and not is_wait(n) and n.target not in COLLECTIVES)
    return True


def _sole_wait(term: Any) -> Node | None:
    """The wait that ``term`` is, or renames, if it has no other readers; else None."""
    term = base(term, lambda n: renames(n) and len(n.users) == 1)
    return term if is_wait(term) and len(term.users) == 1 else None


def _add(put: Put, left: Node, right: Node) -> Node:
    """``left + right``; if both were split and joined in the same way, added before that."""
    first, second = _resharding(left), _resharding(right)
    if first is not None and second is not None:
        (x, *form), (y, *other_form) = first, second
        if form == other_form and same(fake(x).shape, fake(y).shape):
            size, dim, joined = form
            whole = put(aten.split.Tensor, put.add(x, y), size, dim)
            parts = [put(operator.getitem, whole, i) for i in range(len(fake(whole)))]
            return put(aten.cat.default, parts, joined)
    return put.add(left, right)


def _resharding(node: Node) -> tuple[Node, int, int, int] | None:
    """(x, size, dim, joined) if ``node`` is cat(split(x, size, dim), joined), else None. DTensor
    does this to scatter along another dimension than the first."""
    if node.target is not aten.cat.default or len(node.users) != 1:
        return None
    tensors = arguments(node)["tensors"]
    whole = next((n for part in tensors for n in part.all_input_nodes), node)
    if whole.target is not aten.split.Tensor or len(whole.users) != len(tensors):
        return None
    if parts(whole) != dict(enumerate(tensors)):
        return None
    args = arguments(whole)
    size, dim = args["split_size"], args["dim"]
    if not isinstance(size, int) or not isinstance(dim, int):
        return None
    return args["input"], size, dim, arguments(node)["dim"]
