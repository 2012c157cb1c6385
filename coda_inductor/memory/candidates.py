# SPDX-License-Identifier: Apache-2.0
"""The tensors that the forward pass keeps, and what has to run again if one is not kept.

A *heavy* node runs as a kernel of its own: a product, attention, a reduction. All others (views,
casts, elementwise ops) are part of a kernel that reads them. If a kept tensor is freed, the nodes
that lead to it from other kept tensors, or from inputs, run again in the backward pass.

Nothing is a candidate if it would not be bit for bit the same: random ops, collectives, ops that
change their inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import HigherOrderOperator, OpOverload, schema, to_copy, unsafe_index_put
from coda_inductor.graph.nodes import aten, elementwise, fake, may_view, prims
from coda_inductor.graph.walk import closure
from coda_inductor.memory.costs import milliseconds, size
from coda_inductor.select.device import Gpu

#: Ops without the tag of pointwise ops that still cost nothing of their own.
_LIGHT = frozenset(
    {
        aten.clone.default, aten.full.default, aten.scalar_tensor.default, prims.iota.default,
        prims.convert_element_type.default, to_copy, prims.rev.default,
        aten.full_like.default, aten.zeros_like.default, aten.arange.start_step,
    }
)  # fmt: skip
#: Ops that Inductor runs in the memory of their first argument, which is a fresh tensor of zeros.
_WRITTEN_INTO = frozenset(
    {aten.index_put.default, unsafe_index_put, aten.scatter.src, aten.scatter_add.default}
)
_NAMESPACES = ("aten", "prims", "coda_inductor")


def heavy(node: Node) -> bool:
    """Does ``node`` run as a kernel of its own?"""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    return not (elementwise(node) or may_view(node) or node.target in _LIGHT)


def repeatable(node: Node) -> bool:
    """Does ``node`` give the same bits if it runs again in the backward pass?"""
    if isinstance(node.target, HigherOrderOperator):
        return node.target.name() == "flex_attention"
    said = schema(node.target)
    if said is None or said.is_mutable or node.target.namespace not in _NAMESPACES:
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return True
    # Attention draws a mask only where it drops something.
    names = [argument.name for argument in said.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _is_tensor(node: Node) -> bool:
    return node.op == "call_function" and isinstance(fake(node), torch.Tensor)


def owner(node: Node) -> Node:
    """The node whose memory ``node`` has: what it is a view of, or what Inductor writes it into. A
    result of several is its own."""
    while node.op == "call_function" and node.target is not operator.getitem:
        if not (may_view(node) or node.target in _WRITTEN_INTO):
            break
        node = node.all_input_nodes[0]
    return node


@dataclass
class Kept:
    """What one joint graph keeps.

    Attributes:
        forward: nodes that an output of the forward pass needs, in order.
        backward: all others, in order.
        kept: tensors that torch's partitioner keeps without recomputation, apart from inputs and
            outputs; each is the owner of its memory.
        outputs: the outputs of the forward pass, which are there in any case.
    """

    forward: dict[Node, None]
    backward: dict[Node, None]
    kept: dict[Node, None]
    outputs: frozenset[Node]

    @staticmethod
    def of(graph: Graph, outputs: int, names: Collection[str]) -> Kept:
        """Of ``graph`` with ``outputs`` outputs of the forward pass, which keeps ``names``."""
        needed = [n for n in graph.output_node().args[0][:outputs] if isinstance(n, Node)]
        forward = closure(needed, lambda n: n.all_input_nodes)
        ordered = [n for n in graph.nodes if n.op != "output"]
        for node in ordered:  # what a site also computes, for the backward pass alone
            if node.target is operator.getitem and node.all_input_nodes[0] in forward:
                forward[node] = None
        results = frozenset(map(owner, needed))
        owners = {owner(n) for n in ordered if n.name in names} - results
        return Kept(
            {n: None for n in ordered if n in forward},
            {n: None for n in ordered if n not in forward},
            {n: None for n in ordered if n in owners and _is_tensor(n)},
            results,
        )

    def there(self, gone: Collection[Node]) -> set[Node]:
        """What the backward pass has of the forward pass if ``gone`` is not kept."""
        return {*self.kept, *self.outputs} - set(gone)

    def readers(self, node: Node) -> list[Node]:
        """Who reads ``node`` or a view of it."""
        names = closure([node], lambda n: [u for u in n.users if owner(u) is owner(node)])
        return [u for n in names for u in n.users if u not in names]

    def again(self, start: Iterable[Node], gone: Collection[Node]) -> dict[Node, None]:
        """The nodes of the forward pass that run again to compute ``start``, which is not kept, if
        ``gone`` is not kept either: light and heavy ones."""
        there = self.there(gone)

        def step(node: Node) -> list[Node]:
            return [n for n in node.all_input_nodes if n.op == "call_function" and n not in there]

        return closure(start, step)


@dataclass(frozen=True)
class Candidate:
    """A kept tensor that may be freed.

    Attributes:
        node: the tensor.
        size: its bytes.
        again: the heavy nodes that run again for it.
        ms: how long they take.
    """

    node: Node
    size: int
    again: tuple[Node, ...]
    ms: float

    @property
    def price(self) -> float:
        """Milliseconds a byte."""
        return self.ms / max(1, self.size)


def candidates(kept: Kept, gpu: Gpu) -> list[Candidate]:
    """All of them, cheapest first. Tensors of one kernel are freed together: the price of each is
    that of all of them. Among equal prices the earliest layer comes first: it is recomputed last,
    when the others' tensors are gone."""
    times: dict[Node, float] = {}
    groups: dict[tuple[Node, ...], list[Node]] = {}
    for node in kept.kept:
        again = tuple(sorted(n for n in kept.again([node], (node,)) if heavy(n)))
        if all(map(repeatable, again)):
            groups.setdefault(again, []).append(node)
    found = []
    order = {node: i for i, node in enumerate(kept.kept)}
    for again, nodes in groups.items():
        for node in again:
            times.setdefault(node, milliseconds(node, gpu))
        ms = sum(times[n] for n in again)
        if not again:  # elementwise kernels of their own
            ms = sum(size(fake(n)) for n in nodes) * 2 / gpu.bytes_per_us / 1000
        total = sum(size(fake(n)) for n in nodes)
        found += [Candidate(n, size(fake(n)), again, ms * size(fake(n)) / total) for n in nodes]
    return sorted(found, key=lambda c: (round(c.price * 2**30, 2), order[c.node]))
