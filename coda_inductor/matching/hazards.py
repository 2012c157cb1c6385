# SPDX-License-Identifier: Apache-2.0
"""May nodes of a graph be computed together, at the position of the last one?

Two hazards give silently wrong results (both were seen): a write such as ``x.mul_(2)`` between two
nodes of an idiom, and a ``no_grad`` or autocast region that begins or ends in the middle of one.
Two cases are safe: a write to memory that the nodes neither create nor read, and a region of
another mode that begins and ends between two nodes. Models that call other functions between the
nodes of an idiom, such as products with quantized weights, have both.
"""

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.matching.guards import changes, changes_mode, memory, mutates, writes_to

_GRADIENTS = ("_set_grad_enabled", "set_grad_enabled")
_ENTER = ("_enter_autocast", "_enter_inference_mode")
_EXIT = ("_exit_autocast", "_exit_inference_mode")


class Hazards:
    """The changes of memory and of modes between the nodes of ``graph``.

    Attributes:
        writes: the nodes that change memory, in order.
    """

    def __init__(self, graph: Graph):
        self._graph, nodes = graph, list(graph.nodes)
        self.writes = [node for node in nodes if mutates(node)]
        self._modes = _modes(nodes)

    def between(self, nodes: Iterable[Node], to: Node | None = None) -> bool:
        """Does a mode, or memory that one of ``nodes`` creates or reads, change between the first
        and the last of ``nodes`` (or the node ``to``)?"""
        nodes = list(nodes)
        first, last = min(nodes), max(nodes) if to is None else to
        if len({self._mode(node) for node in (*nodes, last)}) > 1:
            return True
        writes = [node for node in self.writes if first < node < last]
        touched = {*nodes}.union(*(node.all_input_nodes for node in nodes)) if writes else ()
        return any(writes_to(node, touched) for node in writes)

    def private(self, nodes: Iterable[Node]) -> bool:
        """Is the memory of all ``nodes`` known, never changed in place, and no graph output?"""
        storages = [memory(node) for node in nodes]
        return all(s is not None and s.isdisjoint(self._shared) for s in storages)

    @functools.cached_property
    def _shared(self) -> set[int]:
        last = self._graph.output_node().all_input_nodes
        return {s for n in (*changes(self._graph), *last) for s in memory(n) or ()}

    def _mode(self, node: Node) -> Hashable:
        """The mode in which ``node`` is computed; ``node`` may be new."""
        return next((mode for start, mode in reversed(self._modes) if start < node), None)


def _modes(nodes: list[Node]) -> list[tuple[Node, Hashable]]:
    """(node, mode after it) for each node that changes the mode. A mode has three parts: are
    gradients on (None: as before the graph, which is unknown), the calls that entered the current
    regions, and the number of other changes."""
    changing = [node for node in nodes if changes_mode(node)]
    if not changing:
        return []
    before = nodes[: nodes.index(changing[0])]
    gradients = True if any(map(differentiated, before)) else None
    regions: list[tuple[Any, Hashable]] = []
    others = 0
    modes: list[tuple[Node, Hashable]] = [(nodes[0], (gradients, (), others))]
    for node in changing:
        name = getattr(node.target, "__name__", "")
        if name in _GRADIENTS and isinstance(enabled := arguments(node).get("input"), bool):
            gradients = enabled
        elif name in _ENTER and not node.all_input_nodes:
            regions.append((node, (name, *map(str, node.args), str(node.kwargs))))
        elif name in _EXIT and regions and regions[-1][0] in node.all_input_nodes:
            regions.pop()
        else:
            others += 1
        modes.append((node, (gradients, tuple(call for _, call in regions), others)))
    return modes


def differentiated(node: Node) -> bool:
    """Is ``node`` computed with a gradient? Then gradients are enabled at its position."""
    value = fake(node)
    computed = isinstance(value, torch.Tensor) and node.op in ("call_function", "call_method")
    return computed and value.requires_grad and not value.is_leaf
