# SPDX-License-Identifier: Apache-2.0
"""Rows that a loop scores sequence by sequence, or chunk by chunk, are scored together.

Before (logits z (B, T, V); the loop is unrolled in Dynamo's graph)::

    lse = torch.stack([torch.logsumexp(z[i], -1) for i in range(B)])
    p = torch.stack([F.log_softmax(z[i], -1).gather(-1, index[i]) for i in range(B)])
    h = torch.cat([entropy(chunk) for chunk in z.flatten(0, 1).split(n)])

After::

    lse = torch.logsumexp(z, -1)
    p = F.log_softmax(z, -1).gather(-1, index)
    h = entropy(z.flatten(0, 1))

Why it is valid: each of these ops computes a row of its result from the same row of its arguments,
and names its dimension from the end.

What it enables: loops save memory in eager (``selective_log_softmax`` and ``entropy_from_logits``
of TRL, verl and OpenRLHF). As one op, a loss's log-sum-exps and entropies leave the head's epilogue
(rule R7), and no log-softmax is in memory at all.

Leaves alone: other ops; parts that something else reads; loops that leave out a part, or take them
in another order; parts of different ranks; tensors that are changed in place in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import DYNAMO, fake, plain
from coda_inductor.graph.read import Call, kind, op_name, read
from coda_inductor.graph.sizes import same
from coda_inductor.matching import Hazards, bodies, replace
from coda_inductor.record import Record

_ELEMENTWISE = ("exp", "neg", "mul", "sub", "add", "div", "truediv")
#: Ops of rows, over their last dimension.
_ROWS = ("logsumexp", "log_softmax", "softmax", "gather", "take_along_dim", "sum", "squeeze",
         "unsqueeze")  # fmt: skip
#: What gives the parts of a tensor.
_PARTS = {"stack": ("unbind",), "cat": ("split", "chunk")}


def score_together(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(graph):
        hazards = Hazards(body.graph)
        for node in list(body.graph.nodes):
            parts = _joined(node)
            if parts is None:
                continue
            loop = _Loop(node)
            alone = loop.add(parts) and all({*n.users} <= {*loop.ops, node} for n in loop.ops)
            if alone and loop.ops and not hazards.between((*loop.ops, node)):
                replace(node, loop.put(parts[0]))


def _joined(node: Node) -> list[Node] | None:
    """The tensors that ``node`` joins in their first dimension, or in a new one in front."""
    call = read(node) if op_name(node) in _PARTS else None
    new = call is not None and call.get("dim") in (None, 0) and call.get("out") is None
    parts = call["tensors"] if call is not None and new else None
    if not isinstance(parts, (list, tuple)) or not parts or plain(*parts) is None:
        return None
    return list(parts)


@dataclass
class _Loop:
    """The loop whose results ``join`` joins.

    Attributes:
        ops: the nodes of all turns.
        first: a node of the first turn -> the tensor that it is a part of; None for an op.
    """

    join: Node
    ops: set[Node] = field(default_factory=set)
    first: dict[Node, Node | None] = field(default_factory=dict)

    def add(self, turns: Sequence[Node]) -> bool:
        """Is it known what ``turns``, the same node of each turn, are together?"""
        if turns[0] not in self.first:
            source = self._source(turns)
            if source is None and not self._are_rows(turns):
                return False
            self.first[turns[0]] = source
        return True

    def _source(self, turns: Sequence[Node]) -> Any:
        items = [x.args for x in turns if op_name(x) == "getitem"]
        numbers = [item[1] for item in items if type(item[1]) is int]  # a bool is a mask
        if numbers != [*range(len(turns))] or len({x for x, _ in items}) > 1:
            return None
        source, how = items[0][0], op_name(self.join)
        value, call = fake(source), read(source)
        if call is not None and call.op in _PARTS[how] and call.get("dim") in (None, 0):
            return source.args[0] if len(value) == len(turns) and plain(source.args[0]) else None
        whole = how == "stack" and plain(source) and same(value.shape[:1], (len(turns),))
        return source if whole else None

    def _are_rows(self, turns: Sequence[Node]) -> bool:
        calls = [call for x in turns if (call := read(x)) is not None and plain(x)]
        if len(calls) < len(turns) or len({(call.op, *call.args) for call in calls}) > 1:
            return False
        self.ops |= {*turns}
        inputs = []
        for name, value in calls[0].args.items():
            each = [call.args[name] for call in calls]
            if isinstance(value, Node):
                if not all(isinstance(x, Node) for x in each) or not self.add(each):
                    return False
                inputs.append(fake(value))
            elif any(x != value for x in each):
                return False
        return self._is_of_rows(calls[0], inputs)

    def _is_of_rows(self, call: Call, inputs: Sequence[Any]) -> bool:
        joined = op_name(self.join) == "cat"
        if not all(isinstance(x, torch.Tensor) for x in inputs):
            return False
        if len({(x.dim(), x.shape[0] if joined and x.dim() else 0) for x in inputs}) != 1:
            return False
        if call.op in _ELEMENTWISE or kind(call.node) == "casts":
            return True
        deep = inputs[0].dim() > (joined and call.op != "unsqueeze")
        return call.op in _ROWS and call.get("dim") in (-1, [-1], (-1,)) and deep

    def put(self, result: Node) -> Node:
        """Insert, in front of ``join``, the ops of the first turn on whole tensors."""
        put, whole = Put(self.join), dict[Node, Node]()
        for node in sorted(self.first):
            source = self.first[node]
            if source is None:
                args, kwargs = map_arg((node.args, node.kwargs), whole.__getitem__)
                source = put(node.target, *args, **kwargs)
                if fake(source).dtype != (dtype := fake(node).dtype):  # recorded under autocast
                    source.meta[DYNAMO] = fake(source).to(dtype)
            whole[node] = source
        return whole[result]
