# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens that are gathered by hand become cross entropies.

Before (policy gradients, DPO; logits (..., V), index (..., 1))::

    p = torch.gather(F.log_softmax(logits, -1), -1, index)
    loss = torch.logsumexp(logits, -1) - torch.gather(logits, -1, index).squeeze(-1)

After::

    loss = F.cross_entropy(logits.flatten(0, -2), index.flatten(), reduction="none")
    p = loss.neg().view_as(index)

Why it is valid: a cross entropy of one class is minus its log-softmax, which is the difference. No
index is ignored: one below zero stays the error that it is.

What it enables: rule R7. No log-softmax of all logits is stored, and their gradient is made a slice
of the vocabulary at a time.

Leaves alone, silently, for nothing is lost that was there: log-softmaxes that something else reads
(an entropy), or over another dimension; several tokens a row; rows that are left out, or may be,
for their number is another symbol; what is changed in place between the two; a difference of other
logits, or of rows that meet all others. In a row with +inf a difference may be infinite, where a
cross entropy is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.dynamo.nodes import Put
from coda_inductor.graph.sizes import same
from coda_inductor.matching import Hazards, bodies, is_view, named, normalize, target_name, value
from coda_inductor.matching.rows import is_last
from coda_inductor.record import Record

#: Of no class, in 32 bits too.
_NOTHING = -(2**31)


def gathered_losses(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(graph):
        hazards = Hazards(body.graph)
        for node in [n for n in body.graph.nodes if target_name(n) in _GATHERS]:
            if (logits := _logits(node, hazards)) is not None:
                _replace(node, logits)
            else:
                for difference, minus in _differences(node, hazards):
                    _replace_difference(difference, node, minus)


_GATHERS = ("gather", "take_along_dim")


def _given(node: Node) -> dict[str, Any] | None:
    if target_name(node) == "gather":
        return named(node, "input", "dim", "index", "sparse_grad", sparse_grad=False)
    given = named(node, "input", "indices", "dim", dim=None)
    return given and {**given, "index": given["indices"], "sparse_grad": False}


def _logits(node: Node, hazards: Hazards) -> Node | None:
    """The logits whose log-softmax ``node`` takes one element a row of; None if it is no such."""
    given = _given(node)
    if given is None or not isinstance(softmax := given["input"], Node) or given["sparse_grad"]:
        return None
    canon = normalize(softmax)
    if canon is None or canon.op != "log_softmax_last" or len(softmax.users) > 1:
        return None
    (logits,) = canon.args
    taken = _takes_one_a_row(given, logits, softmax)
    return logits if taken and not hazards.between((softmax, node)) else None


def _takes_one_a_row(given: dict[str, Any], logits: Node, source: Node) -> bool:
    """Does a gather take one element of each row of ``source``, (..., V) like ``logits`` and no
    narrower?"""
    x, rows, index = value(logits), value(source), value(given["index"])
    if not all(hasattr(t, "fake_mode") for t in (x, rows, index)) or index.dtype != torch.int64:
        return False
    last, one = (
        is_last(given["dim"], given["input"]),
        x.dim() > 1 and same(tuple(index.shape), (*x.shape[:-1], 1)),
    )
    narrowed = torch.promote_types(x.dtype, rows.dtype) != rows.dtype
    return last and one and x.is_floating_point() and not narrowed


def _differences(node: Node, hazards: Hazards) -> Iterator[tuple[Node, bool]]:
    """Each difference of what ``node`` gathers from logits and their log-sum-exp, and whether that
    is what is subtracted."""
    given = _given(node)
    if given is None or not isinstance(logits := given["input"], Node) or given["sparse_grad"]:
        return
    if not _takes_one_a_row(given, logits, logits):
        return
    for each in _without_last(node):
        for user in list(each.users):
            canon = normalize(user)
            if canon is None or canon.op != "sub" or len(canon.args) != 2 or user.kwargs:
                continue
            other = canon.args[canon.args[0] is each]
            total = _logsumexp(other, logits) if isinstance(other, Node) else None
            shapes = [tuple(getattr(value(n), "shape", ())) for n in (user, each)]
            if total is None or not same(*shapes):
                continue
            read = total.all_input_nodes[0]
            casts = () if read is logits else (read, logits)  # one cast, written twice
            if not hazards.between((*casts, node, each, total, other, user)):
                yield user, canon.args[1] is other


def _without_last(node: Node) -> list[Node]:
    """``node`` (..., 1), and what reads it without its last dimension."""
    return [node, *(u for u in node.users if is_view(u, value(node).squeeze(-1)))]


def _logsumexp(node: Node, logits: Node) -> Node | None:
    """The log-sum-exp of each row of ``logits`` that ``node`` is, or has a dimension more than;
    None if it is none."""
    if target_name(node) == "unsqueeze" and node.args[1:] == (-1,):
        node = node.args[0]
    if target_name(node) != "logsumexp":
        return None
    given = named(node, "input", "dim", "keepdim", keepdim=False)
    if given is None or not _one(given["input"], logits):
        return None
    return node if is_last(given["dim"], logits) else None


def _replace(node: Node, logits: Node) -> None:
    """Put the cross entropy in the place of ``node``, a gather of a log-softmax."""
    given = _given(node)
    assert given is not None, "asked before"
    softmax = given["input"]
    _put_loss(node, logits, given["index"], value(softmax).dtype, negative=True)
    node.graph.erase_node(node)
    node.graph.erase_node(softmax)


def _replace_difference(node: Node, gather: Node, minus: bool) -> None:
    """Put the cross entropy in the place of ``node``; ``minus``: of a log-likelihood."""
    given = _given(gather)
    assert given is not None, "asked before"
    _put_loss(node, given["input"], given["index"], value(node).dtype, negative=minus)
    todo = [node]
    while todo:  # what nothing reads now: pure ops, down to the logits
        dead = todo.pop()
        if not dead.users and dead is not given["input"] and dead is not given["index"]:
            todo += dead.all_input_nodes
            dead.graph.erase_node(dead)


def _put_loss(node: Node, logits: Node, index: Node, dtype: torch.dtype, *, negative: bool) -> None:
    """Let the users of ``node`` read the cross entropy of ``logits``, computed in ``dtype`` and
    shaped like ``node``: like ``index`` or without its last dimension."""
    put = Put(node)
    if value(logits).dtype != dtype:
        logits = put("to", logits, dtype)
    rows, classes = put("flatten", logits, 0, -2), put("flatten", index)
    found = put(F.cross_entropy, rows, classes, ignore_index=_NOTHING, reduction="none")
    if negative:
        found = put("neg", found)
    found = put("view_as", found, index)
    if value(node).dim() < value(index).dim():
        found = put("squeeze", found, -1)
    node.replace_all_uses_with(found)


def _one(left: Node, right: Node) -> bool:
    """Are both one tensor, or one cast of it that was written twice?"""
    if left is right:
        return True
    canon = normalize(left)
    cast = canon is not None and canon.op == "cast"
    calls = [(n.op, n.target, n.args, n.kwargs) for n in (left, right)]
    return cast and calls[0] == calls[1]
