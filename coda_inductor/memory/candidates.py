# SPDX-License-Identifier: Apache-2.0
"""The tensors that the forward pass keeps, and the nodes that run again if one is not kept.

A *heavy* node runs as a kernel of its own: a product, attention, a reduction. All others (views,
casts, elementwise ops) are part of a kernel that reads them. If a kept tensor is freed, the nodes
that lead to it from other kept tensors, or from inputs, run again in the backward pass.

A tensor that would not be the same bit by bit is no candidate: results of random ops, of
collectives, and of ops that change their inputs.
"""

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import HigherOrderOperator, OpOverload, schema, to_copy, unsafe_index_put
from coda_inductor.graph.aliases import old_values
from coda_inductor.graph.nodes import aten, bytes_of, elementwise, fake, may_view, prims
from coda_inductor.graph.read import read
from coda_inductor.graph.walk import closure, readers

#: Ops without the tag of pointwise ops that still cost nothing of their own.
_LIGHT = {
    aten.clone.default, aten.full.default, aten.scalar_tensor.default, prims.iota.default,
    prims.convert_element_type.default, to_copy, prims.rev.default,
    aten.full_like.default, aten.zeros_like.default, aten.arange.start_step,
}  # fmt: skip
#: Ops that Inductor runs in the memory of their first argument, which is a fresh tensor of zeros.
_WRITTEN_INTO = (aten.index_put.default, unsafe_index_put, aten.scatter.src,
                 aten.scatter_add.default)  # fmt: skip
#: So many tensors of a chain, each computed from the one before, may be freed in a row: the
#: backward pass begins with the last one, and computes all of them for it at once.
_LINKS = 3
_NAMESPACES = ("aten", "prims", "coda_inductor")


def heavy(node: Node) -> bool:
    """Does ``node`` run as a kernel of its own?"""
    if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    return not (elementwise(node) or may_view(node) or node.target in _LIGHT)


def repeatable(node: Node) -> bool:
    """Does ``node`` produce the same bits if it runs again in the backward pass?"""
    if isinstance(node.target, HigherOrderOperator):
        return node.target.name() == "flex_attention"
    op_schema = schema(node.target)
    if op_schema is None or op_schema.is_mutable or node.target.namespace not in _NAMESPACES:
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return True
    call = read(node)  # attention draws a mask only where it drops something
    return call is not None and call.get("dropout_p") == 0.0


def owner(node: Node) -> Node:
    """The node that owns the memory of ``node``: the base of a view (also of ``split``), or the
    tensor that Inductor writes it into."""
    while node.op == "call_function":
        source = maker(node)
        if not (may_view(source) or source.target in _WRITTEN_INTO):
            break
        node = source.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class Drop:
    """Tensors that the forward pass does not keep.

    Attributes:
        nodes: kept tensors that are computed again.
        proxies: smaller results that are kept instead.
        halves: tensors that are computed again without the other half of their pair.
    """

    nodes: frozenset[Node] = frozenset()
    proxies: frozenset[Node] = frozenset()
    halves: frozenset[Node] = frozenset()

    def __or__(self, other: "Drop") -> "Drop":
        return Drop(
            self.nodes | other.nodes, self.proxies | other.proxies, self.halves | other.halves
        )


@dataclass
class Stash:
    """The tensors that one joint graph keeps.

    Attributes:
        forward: nodes that an output of the forward pass needs, in order.
        backward: all others, in order.
        tensors: the tensors that torch's partitioner keeps, without recomputation, inputs and
            outputs; each owns its memory.
        outputs: the outputs of the forward pass, which are there in any case.
        pinned: nodes that must not run again, because an input that they read is written to.
        halves: results of pairs, each with a node, without readers yet, that computes it alone.
    """

    forward: dict[Node, None]
    backward: dict[Node, None]
    tensors: dict[Node, None]
    outputs: frozenset[Node]
    pinned: frozenset[Node] = frozenset()
    halves: dict[Node, Node] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, outputs: int, names: Collection[str]) -> "Stash":
        """The stash if ``names`` are kept, and ``outputs`` outputs are the forward pass's."""
        roots = [n for n in graph.output_node().args[0][:outputs] if isinstance(n, Node)]
        forward = closure(roots, lambda n: n.all_input_nodes)
        ordered = [n for n in graph.nodes if n.op != "output"]
        for node in ordered:  # what a site also computes, for the backward pass alone
            if node.target is operator.getitem and node.all_input_nodes[0] in forward:
                forward[node] = None
        results = frozenset(map(owner, roots))
        owners = {owner(n) for n in ordered if n.name in names} - results
        owners = {n for n in owners if n.op == "call_function"}
        return Stash(
            {n: None for n in ordered if n in forward},
            {n: None for n in ordered if n not in forward},
            {n: None for n in ordered if n in owners and isinstance(fake(n), torch.Tensor)},
            results,
            frozenset(old_values(graph)),
        )

    def after(self, drop: Drop) -> set[Node]:
        """The forward values that the backward pass has under ``drop``."""
        return {*self.tensors, *self.outputs, *drop.proxies} - drop.nodes

    def readers(self, node: Node) -> list[Node]:
        """The readers of ``node`` and of its views."""
        return readers(node, lambda n: owner(n) is owner(node))[1]

    def rerun(self, start: Iterable[Node], drop: Drop) -> dict[Node, None]:
        """The forward nodes that run again under ``drop`` to compute ``start``."""
        saved = self.after(drop)

        def step(node: Node) -> list[Node]:
            inputs = [self.halves[node]] if node in drop.halves else node.all_input_nodes
            return [n for n in inputs if n.op == "call_function" and n not in saved]

        return closure(start, step)


@dataclass(frozen=True)
class Group:
    """Kept tensors that the same kernels compute, so that they are freed together.

    Attributes:
        nodes: the tensors.
        levels: the choices, from all tensors kept to the fewest.
        kind: equal for groups of equal cost, as in several layers.
    """

    nodes: tuple[Node, ...]
    levels: tuple[Drop, ...]
    kind: tuple[Any, ...]

    @property
    def size(self) -> int:
        """The total bytes of the group's tensors."""
        return bytes_of(*self.nodes)

    def saved(self, level: int) -> int:
        """The bytes that ``level`` does not keep."""
        drop = self.levels[level]
        return bytes_of(*drop.nodes) - bytes_of(*drop.proxies)


def groups(stash: Stash) -> list[Group]:
    """All groups, in the graph's order. The levels of a group are: keep it; keep smaller results
    that its tensors are elementwise functions of (keys before they are repeated for all queries,
    for example); compute one half of a pair again; keep nothing. Of a chain of tensors, such as
    residual streams, every fourth stays."""
    makers: dict[tuple[tuple[Node, ...], Node | None], list[Node]] = {}
    links: dict[tuple[Any, Node], int] = {}
    for node in stash.tensors:
        kernels = tuple(sorted(filter(heavy, stash.rerun([node], Drop(frozenset([node]))))))
        makers.setdefault((kernels, None if kernels else node), []).append(node)
    result = []
    for (kernels, _), nodes in makers.items():
        tensors = frozenset(nodes)
        proxies = _sources(stash, tensors)
        levels = [Drop()]
        smaller = bytes_of(*proxies) < bytes_of(*nodes)
        if kernels and smaller and not any(heavy(maker(n)) for n in nodes):
            levels.append(Drop(tensors, proxies))
        if all(map(repeatable, kernels)):
            last = frozenset([n for n in nodes if n in stash.halves][-1:])
            levels += [Drop(last, halves=last)] if last and len(nodes) > 1 else []
            levels.append(Drop(tensors))
        levels = [d for d in levels if stash.pinned.isdisjoint(stash.rerun(d.nodes, d))]
        sizes = [sorted(map(bytes_of, ns)) for ns in (nodes, proxies)]
        kind = (len(levels), str(sizes), str([n.target for n in kernels]))
        runs = stash.rerun(nodes, Drop(tensors))
        sources = {owner(n) for run in runs for n in run.all_input_nodes}
        link = 1 + max((links.get((kind, n), 0) for n in sources), default=0)
        if len(levels) > 1 and link <= _LINKS:
            result.append(Group(tuple(nodes), tuple(levels), kind))
            links |= {(kind, node): link for node in nodes}
    return result


def _sources(stash: Stash, nodes: frozenset[Node]) -> frozenset[Node]:
    """The results of heavy nodes, not kept, from which elementwise ops compute ``nodes``."""
    saved = stash.after(Drop(nodes))

    def light(node: Node) -> list[Node]:
        inputs = [owner(n) for n in node.all_input_nodes if n.op == "call_function"]
        return [n for n in inputs if n not in saved and not heavy(maker(n))]

    inside = closure(nodes, light)
    inputs = {owner(n) for node in inside for n in node.all_input_nodes if n.op == "call_function"}
    return frozenset(n for n in inputs if n not in saved and heavy(maker(n)))


def maker(node: Node) -> Node:
    """The node that computes ``node``, which may be one of its results."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node
