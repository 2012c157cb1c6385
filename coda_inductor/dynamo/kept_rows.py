# SPDX-License-Identifier: Apache-2.0
"""Logits of some rows come from a head that reads these rows alone.

Before (hidden states x (B, T, D), of whose logits nothing else is read)::

    z = linear(x, W)[:, :-1]                  # or [:, :-1][:, -k:]; a cast, a temperature
    chosen = z.log_softmax(-1).gather(-1, tokens);  entropy = ...(z)

After::

    z = linear(x[:, :-1], W)

Why it is valid: a row of a product, and of what is elementwise in it, needs one of its left factor.

What it enables: rule R7 of losses and entropies together. A slice of the rows of logits cannot
leave the head's epilogue; x is a hundredth of their size.

Leaves alone: logits that something else reads; slices that ``losses`` has made needless; slices of
columns, other indices; slices that no loss reads; what is changed in place; heads under autocast.
"""

import operator
from typing import Any

import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, plain
from coda_inductor.graph.read import called, kind, op_name
from coda_inductor.graph.walk import closure
from coda_inductor.matching import Hazards, bodies, move
from coda_inductor.record import Record

#: Elementwise ops that may be between a head and a loss; they take one tensor and numbers.
_BETWEEN = ("mul", "div", "tanh", "truediv")
_LOSSES = ("cross_entropy", "softmax", "log_softmax", "logsumexp", "nll_loss")


def keep_rows(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(graph):
        hazards = Hazards(body.graph)
        for node in list(body.graph.nodes):
            if op_name(node) == "getitem" and plain(node) is not None and _has_loss(node):
                _keep(node, hazards)


def _keep(node: Node, hazards: Hazards) -> None:
    steps = [node, node.all_input_nodes[0]]
    while len(steps[-1].users) == 1 and (_is_elementwise(steps[-1]) or _is_slice(steps[-1])):
        steps.append(steps[-1].all_input_nodes[0])
    head, slices = steps[-1], [step for step in reversed(steps[:-1]) if _is_slice(step)]
    if len(head.users) > 1 or called(head, "linear") is None:
        return
    args = arguments(head)
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    tensors = plain(x, weight, head)
    if tensors is None or len({t.dtype for t in tensors}) > 1:
        return
    of_rows = all(_of_rows(step.args[1], tensors[0].dim()) for step in slices)
    if not of_rows or node not in slices or hazards.between((x, *steps)):
        return
    put = Put(node)
    for step in slices:
        x = put(operator.getitem, x, step.args[1])
    new = put(F.linear, x, weight, bias)
    for step in reversed(steps[:-1]):
        if step not in slices:
            args, kwargs = map_arg((step.args, step.kwargs), lambda _, source=new: source)
            new = put(step.target, *args, **kwargs)
    move(node, new)


def _has_loss(node: Node) -> bool:
    def passes(n: Node) -> bool:
        return n is node or kind(n) in ("names", "casts", "copies") or _is_elementwise(n)

    reached = closure([node], lambda n: n.users if passes(n) else ())
    return any(op_name(n) in _LOSSES for n in reached)


def _is_slice(node: Node) -> bool:
    return op_name(node) == "getitem" and len(node.all_input_nodes) == 1


def _is_elementwise(node: Node) -> bool:
    cast = kind(node) == "casts"
    return (cast or op_name(node) in _BETWEEN) and len(node.all_input_nodes) == 1


def _of_rows(index: Any, dim: int) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    if parts and parts[0] is Ellipsis:
        parts = (slice(None),) * (dim - len(parts) + 1) + parts[1:]
    numbers = [getattr(p, name, p) for p in parts for name in ("start", "stop", "step")]
    whole = len(parts) < dim or parts[-1] == slice(None)
    slices = all(isinstance(p, slice) for p in parts) and dim > 1
    return whole and slices and all(n is None or isinstance(n, int) for n in numbers)
