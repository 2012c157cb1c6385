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

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.dynamo.nodes import Put
from coda_inductor.graph.read import Call, read
from coda_inductor.graph.sizes import same
from coda_inductor.matching import Hazards, bodies, is_cast, is_view, normalize, target_name, value
from coda_inductor.matching.normalize import is_last
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
            call = read(node)
            if call is None or call.get("sparse_grad"):
                continue
            if (logits := _logits(call, hazards)) is not None:
                _replace(call, logits)
            else:
                for difference, minus in _differences(call, hazards):
                    _replace_difference(difference, call, minus)


_GATHERS = ("gather", "take_along_dim")


def _logits(gather: Call, hazards: Hazards) -> Node | None:
    """The logits whose log-softmax is gathered, one element a row; None if it is no such."""
    softmax = gather["input"]
    canon = normalize(softmax)
    if canon is None or canon.op != "log_softmax_last" or len(softmax.users) > 1:
        return None
    (logits,) = canon.args
    taken = _takes_one_a_row(gather, logits)
    return logits if taken and not hazards.between((softmax, gather.node)) else None


def _takes_one_a_row(gather: Call, logits: Node) -> bool:
    """Is one element of each row gathered, of a tensor (..., V) like ``logits``, no narrower?"""
    x, rows, index = value(logits), value(gather["input"]), value(gather["index"])
    if not all(hasattr(t, "fake_mode") for t in (x, rows, index)) or index.dtype != torch.int64:
        return False
    last, one = (
        is_last(gather["dim"], gather["input"]),
        x.dim() > 1 and same(tuple(index.shape), (*x.shape[:-1], 1)),
    )
    narrowed = torch.promote_types(x.dtype, rows.dtype) != rows.dtype
    return last and one and x.is_floating_point() and not narrowed


def _differences(gather: Call, hazards: Hazards) -> Iterator[tuple[Node, bool]]:
    """Each difference of what is gathered from logits and their log-sum-exp, and whether that is
    what is subtracted."""
    node, logits = gather.node, gather["input"]
    if not _takes_one_a_row(gather, logits):
        return
    for each in _without_last(node):
        for user in list(each.users):
            canon = normalize(user)
            if canon is None or canon.op != "sub":
                continue
            left, right = canon.args
            other = right if left is each else left
            total = _logsumexp(other, logits) if isinstance(other, Node) else None
            shapes = [tuple(getattr(value(n), "shape", ())) for n in (user, each)]
            if total is None or not same(*shapes):
                continue
            read = total.all_input_nodes[0]
            casts = () if read is logits else (read, logits)  # one cast, written twice
            if not hazards.between((*casts, node, each, total, other, user)):
                yield user, right is other


def _without_last(node: Node) -> list[Node]:
    """``node`` (..., 1), and what reads it without its last dimension."""
    return [node, *(u for u in node.users if is_view(u, value(node).squeeze(-1)))]


def _logsumexp(node: Node, logits: Node) -> Node | None:
    """The log-sum-exp of each row of ``logits`` that ``node`` is, or has a dimension more than;
    None if it is none."""
    call = read(node)
    if call is not None and call.op == "unsqueeze" and call["dim"] == -1:
        call = read(call["input"])
    if call is None or call.op != "logsumexp" or not _one(call["input"], logits):
        return None
    return call.node if is_last(call["dim"], logits) else None


def _replace(gather: Call, logits: Node) -> None:
    """Put the cross entropy in the place of a gather of a log-softmax."""
    node, softmax = gather.node, gather["input"]
    _put_loss(node, logits, gather["index"], value(softmax).dtype, negative=True)
    node.graph.erase_node(node)
    node.graph.erase_node(softmax)


def _replace_difference(node: Node, gather: Call, minus: bool) -> None:
    """Put the cross entropy in the place of ``node``; ``minus``: of a log-likelihood."""
    logits, index = gather["input"], gather["index"]
    _put_loss(node, logits, index, value(node).dtype, negative=minus)
    todo = [node]
    while todo:  # what nothing reads now: pure ops, down to the logits
        dead = todo.pop()
        if not dead.users and dead is not logits and dead is not index:
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
    calls = [(n.op, n.target, n.args, n.kwargs) for n in (left, right)]
    return is_cast(left) and calls[0] == calls[1]
