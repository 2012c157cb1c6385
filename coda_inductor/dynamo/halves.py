# SPDX-License-Identifier: Apache-2.0
"""The halves of a product, however they are taken out of it, become those of one ``chunk``.

Before (z = x @ W, (..., 2F))::

    g, u = z.view(..., 2, F).unbind(-2)         # also [..., 0, :], slices, narrow, tensor_split
    a = F.glu(z)

After::

    g, u = z.chunk(2, -1)
    g, u = z.chunk(2, -1);  a = g * sigmoid(u)

Why it is valid: they are the same columns, views of the same memory, with the same strides; a gated
linear unit is that product (Dauphin et al., arXiv 1612.08083, eq. 1).

What it enables: rule R6, for ``rewrite.packed`` knows the halves of a product. The gradient of a
``chunk`` puts two tensors together, where that of slices adds two that are filled up with zeros.

Leaves alone, silently, for nothing is lost that was there: products of unknown or odd width; one
half alone; what is changed in place, or leaves the graph (autograd lets nobody change in place what
a ``chunk`` returns); halves that a change or a mode lies between.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from coda_inductor.graph.sizes import same
from coda_inductor.matching import (
    Hazards,
    bodies,
    changes,
    memory,
    named,
    normalize,
    target_name,
    value,
)
from coda_inductor.record import Record

_PRODUCTS = ("linear", "matmul", "mm", "addmm")
#: What gives halves, and what may lie between a product and that; all else is not looked at.
_CUTS = ("getitem", "select", "narrow")
_BETWEEN = ("view", "reshape", "unflatten", "unbind", "tensor_split", "chunk", "split")
_JOINED = ("chunk", "split")  # whose gradient is put together already


def take_halves(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    gm = graph.owning_module
    assert isinstance(gm, GraphModule), "Dynamo's graph has an owner"
    for body in bodies(gm):
        products = [n for n in body.graph.nodes if _product(n)]
        cuts = [(z, found) for z in products if (found := _halves(z)) or _units(z)]
        if cuts and _rewrite(body.graph, cuts):
            body.module.recompile()


def _product(node: Node) -> bool:
    """Is ``node`` a product of matrices (..., 2F)?"""
    known = value(node)
    if target_name(node) not in _PRODUCTS or not hasattr(known, "fake_mode") or not known.dim():
        return False
    width = known.shape[-1]
    return isinstance(width, int) and width > 0 and width % 2 == 0


def _halves(product: Node) -> dict[Node, int]:
    """Nodes that take the lower (0) or the upper (1) half of the columns of ``product``, if both
    are taken, and not by one ``chunk``."""
    half = value(product).shape[-1] // 2
    ends = {(0, half): 0, (half, None): 1}
    found: dict[Node, int] = {}
    for node in _near(product):
        canon = normalize(node) if target_name(node) in _CUTS else None
        if canon is None or canon.op != "columns" or canon.args[0] is not product:
            continue
        _, start, stop, step = canon.args
        if step == 1 and (start, stop) in ends:
            found[node] = ends[start, stop]
    sources = {node.args[0] for node in found}
    joined = len(sources) == 1 and target_name(next(iter(sources))) in _JOINED
    return found if len(set(found.values())) == 2 and not joined else {}


def _near(product: Node) -> list[Node]:
    """What reads ``product``, or what a view and a division make of it."""
    near, behind = [], [product]
    while behind:
        users = [u for node in behind for u in node.users]
        near += users
        behind = [u for u in users if target_name(u) in _BETWEEN]
    return near


def _units(product: Node) -> list[Node]:
    """The gated linear units of the columns of ``product``."""
    found = []
    for node in product.users:
        given = named(node, "input", "dim", dim=-1) if target_name(node) == "glu" else None
        if given is not None and given["dim"] in (-1, value(product).dim() - 1):
            found.append(node)
    return found


def _rewrite(graph: Graph, cuts: list[tuple[Node, dict[Node, int]]]) -> bool:
    """Returns whether anything was changed."""
    hazards, last = Hazards(graph), graph.output_node().all_input_nodes
    shared = {s for n in (*changes(graph), *last) for s in memory(n) or ()}
    changed = False
    for product, halves in cuts:
        own = memory(product)
        if own is None or not own.isdisjoint(shared):
            continue
        for unit in _units(product):
            changed |= _expand(product, unit)
        if halves and not hazards.between(halves):
            _replace(product, halves)
            changed = True
    return changed


def _expand(product: Node, unit: Node) -> bool:
    """Returns whether it was: not where the result would be laid out otherwise."""
    with value(product).fake_mode, unit.graph.inserting_before(unit):
        lower, upper = value(product).chunk(2, -1)
        if not same((lower * torch.sigmoid(upper)).stride(), value(unit).stride()):
            return False
        put = _Put(unit)
        gate = put.chunk(product)
        new = put(operator.mul, gate[0], put(torch.sigmoid, gate[1]))
    unit.replace_all_uses_with(new)
    unit.graph.erase_node(unit)
    return True


def _replace(product: Node, halves: dict[Node, int]) -> None:
    first = min(halves)
    with product.graph.inserting_before(first), value(product).fake_mode:
        parts = _Put(first).chunk(product)
    for node, index in halves.items():
        node.replace_all_uses_with(parts[index])
        _erase(node, product)


def _erase(node: Node, product: Node) -> None:
    """Erase ``node``, and what is between it and ``product`` and read by nothing else."""
    while node is not product and not node.users:
        source = node.args[0]
        node.graph.erase_node(node)
        node = source


class _Put:
    """Puts calls into a graph, with the metadata of ``like`` and recorded values."""

    def __init__(self, like: Node):
        self.like = like

    def __call__(self, target: Any, *args: Any) -> Node:
        made = self.like.graph.call_function(target, args)
        known = target(*torch.fx.node.map_arg(args, value))
        made.meta = {**self.like.meta, "example_value": known}
        return made

    def chunk(self, product: Node) -> tuple[Node, Node]:
        parts = self(torch.chunk, product, 2, -1)
        lower, upper = (self(operator.getitem, parts, i) for i in range(2))
        return lower, upper
