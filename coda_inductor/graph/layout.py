# SPDX-License-Identifier: Apache-2.0
"""Give a tensor other strides, where nobody sees them; compare what is seen before and after."""

import heapq
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import storage, tree_leaves
from coda_inductor.graph.aliases import inspected, names, spectator
from coda_inductor.graph.edit import evaluate
from coda_inductor.graph.nodes import DYNAMO, fake, is_erased, label, may_view
from coda_inductor.graph.sizes import alike, hint, strides
from coda_inductor.graph.walk import chain
from coda_inductor.refusal import Refusal, refuse

#: Nodes that see memory -> how their inputs lie in it.
Layouts = dict[Node, list[Any]]


def relay(old: Node, new: Node, users: Iterable[Node] | None = None) -> Refusal | None:
    """Let ``users`` of ``old``, by default all, read ``new``: the same values, other strides.

    Strides are recorded anew for all that is computed from them. Returns None; or, and then nothing
    has changed, why the old strides must stay: a reader sees memory, or is a view that the new ones
    do not allow. The caller erases ``old`` if nobody reads it any more.
    """
    readers = [user for user in (old.users if users is None else users) if user is not new]
    aliases = names(old)
    for user in readers:
        user.replace_input_with(old, new)
    if _lies(fake(old)) == _lies(fake(new)):
        return None
    before: dict[Node, Any] = {}
    visited, touched = set[Node](), {new}
    todo = sorted(readers)
    while todo:
        node = heapq.heappop(todo)
        if node in visited:
            continue
        visited.add(node)
        sees = not touched.isdisjoint(inspected(node))
        value = None if sees else _value(node)
        if sees or (value is None and fake(node) is not None):
            for user in readers:
                user.replace_input_with(new, old)
            for changed, recorded in before.items():
                _record(changed, recorded)
            return _seen_by(node)
        same = alike(value, fake(node))
        if not same:
            before[node] = fake(node)
            _record(node, value)
        if not same or node in aliases:
            touched.add(node)
            for user in node.users:
                heapq.heappush(todo, user)
    return None


def seen(nodes: Iterable[Node]) -> Refusal | None:
    """Why the layouts of all ``nodes`` must stay: a reader of one sees memory. Else None."""
    readers = (reader for node in nodes if (reader := spectator(node)) is not None)
    return next(map(_seen_by, readers), None)


def _seen_by(reader: Node) -> Refusal:
    what = "the caller sees" if reader.op == "output" else f"{label(reader)} depends on"
    return refuse("memory-seen", f"{what} how it lies in memory")


def _value(node: Node) -> Any:
    """The value of ``node`` for the recorded values of its inputs; None if it has none."""
    try:
        return evaluate(node.target, node.args, node.kwargs, like=node)
    except (RuntimeError, ValueError):  # a view that these strides do not allow
        return None


def _record(node: Node, value: Any) -> None:
    node.meta[DYNAMO if DYNAMO in node.meta else "val"] = value


def refresh(node: Node) -> None:
    """Let the recorded value of ``node``, if it is a view, share memory with the present value of
    its base: after a base is replaced, it would still be a view of the old one."""
    if node.op == "call_function" and may_view(node) and node.all_input_nodes:
        source, result = _storages(node.all_input_nodes[0]), _storages(node)
        if not result <= source:
            node.meta["val"] = evaluate(node.target, node.args, node.kwargs, like=node)


def refresh_views(graph: Graph, _record: object = None) -> None:
    """A pass: ``refresh`` all views, because torch reads from recorded values which memory it may
    overwrite, and an output may be a view of a saved tensor."""
    for node in graph.nodes:
        refresh(node)


def _storages(node: Node) -> set[int]:
    return set(map(storage, _strided(fake(node))))


def layouts(graph: Graph) -> Layouts:
    """What the nodes of an aten graph that see memory read."""
    return {node: _layouts(node) for node in graph.nodes if inspected(node)}


def check_layouts(before: Layouts) -> None:
    """Raise a RuntimeError if a node of ``before`` no longer sees the layouts that it saw."""
    for node in before:
        if not is_erased(node) and _layouts(node) != before[node]:
            raise RuntimeError(f"it changed how what {node} reads lies in memory")


def _layouts(node: Node) -> list[Any]:
    """The layouts that ``node`` sees. Callers see strides, not where a tensor begins."""
    inputs = inspected(node)
    for name in (name for n in inputs for name in reversed(chain(n, may_view))):
        refresh(name)
    sees = _strides if node.op == "output" else _lies
    return [sees(fake(n)) for n in inputs]


def _strides(value: Any) -> list[Any]:
    return [strides(t) for t in _strided(value)]


def _lies(value: Any) -> list[Any]:
    """The strides of all tensors in ``value``, where each begins in its memory, and its bytes."""
    ends = [(t.storage_offset(), t.untyped_storage().nbytes()) for t in _strided(value)]
    return [*_strides(value), *(tuple(map(hint, pair)) for pair in ends)]


def _strided(value: Any) -> list[torch.Tensor]:
    tensors = (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))
    return [t for t in tensors if t.layout == torch.strided]
