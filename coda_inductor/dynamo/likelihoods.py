# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens that are gathered by hand become cross entropies.

Before (policy gradients, DPO; logits (..., V), index (..., 1))::

    p = torch.gather(F.log_softmax(logits, -1), -1, index)

After::

    loss = F.cross_entropy(logits.flatten(0, -2), index.flatten(), reduction="none")
    p = loss.neg().view_as(index)

Why it is valid: a cross entropy of one class is minus its log-softmax. No index is ignored: one
below zero stays the error that it is.

What it enables: rule R7. No log-softmax of all logits is stored, and their gradient is made a slice
of the vocabulary at a time.

Leaves alone, silently, for nothing is lost that was there: log-softmaxes that something else reads
(an entropy), or over another dimension; several tokens a row; rows that are left out, or may be,
for their number is another symbol; what is changed in place between the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from coda_inductor.graph.sizes import same
from coda_inductor.matching import bodies, epochs, named, normalize, target_name, value
from coda_inductor.record import Record

#: Of no class, in 32 bits too.
_NOTHING = -(2**31)


def gathered_losses(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    gm = graph.owning_module
    assert isinstance(gm, GraphModule), "Dynamo's graph has an owner"
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(gm):
        epoch = epochs(body.graph)
        found = [n for n in body.graph.nodes if target_name(n) == "gather"]
        for node in found:
            if (logits := _logits(node, epoch)) is not None:
                _replace(node, logits)
        if found:
            body.module.recompile()


def _given(node: Node) -> dict[str, Any] | None:
    return named(node, "input", "dim", "index", "sparse_grad", sparse_grad=False)


def _logits(node: Node, epoch: dict[Node, int]) -> Node | None:
    """The logits whose log-softmax ``node`` takes one element a row of; None if it is no such."""
    given = _given(node)
    if given is None or not isinstance(softmax := given["input"], Node) or given["sparse_grad"]:
        return None
    canon = normalize(softmax)
    if canon is None or canon.op != "log_softmax_last" or len(softmax.users) > 1:
        return None
    (logits,) = canon.args
    x, rows, index = value(logits), value(softmax), value(given["index"])
    if not all(hasattr(t, "fake_mode") for t in (x, rows, index)):
        return None
    last = isinstance(given["dim"], int) and given["dim"] in (-1, x.dim() - 1)
    one = x.dim() > 1 and same(tuple(index.shape), (*x.shape[:-1], 1))
    narrowed = torch.promote_types(x.dtype, rows.dtype) != rows.dtype
    plain = x.is_floating_point() and not narrowed and epoch[softmax] == epoch[node]
    return logits if last and one and plain else None


def _replace(node: Node, logits: Node) -> None:
    """Put the cross entropy in the place of ``node``."""
    given, graph = _given(node), node.graph
    assert given is not None, "asked before"
    softmax, index = given["input"], given["index"]
    x, i, dtype = value(logits), value(index), value(softmax).dtype

    def put(target: Any, *args: Any, of: Any, **kwargs: Any) -> Node:
        make = graph.call_method if isinstance(target, str) else graph.call_function
        made = make(target, args, kwargs)
        made.meta = {**node.meta, "example_value": of}
        return made

    with graph.inserting_before(node), x.fake_mode:
        if x.dtype != dtype:
            x = x.to(dtype)
            logits = put("to", logits, dtype, of=x)
        x, i = x.flatten(0, -2), i.flatten()
        rows, classes = put("flatten", logits, 0, -2, of=x), put("flatten", index, of=i)
        how: dict[str, Any] = {"ignore_index": _NOTHING, "reduction": "none"}
        loss = F.cross_entropy(x, i, **how)
        found = put(F.cross_entropy, rows, classes, of=loss, **how)
        found = put("neg", found, of=loss.neg())
        found = put("view_as", found, index, of=loss.neg().view_as(value(index)))
    node.replace_all_uses_with(found)
    graph.erase_node(node)
    graph.erase_node(softmax)
