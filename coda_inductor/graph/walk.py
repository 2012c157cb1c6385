# SPDX-License-Identifier: Apache-2.0
"""Walks from a node up to its inputs and sources, and down to its readers."""

import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.graph.nodes import (
    arguments,
    elementwise,
    fake,
    is_cast,
    may_view,
    renames,
    renames_or_casts,
)  # fmt: skip

#: The most nodes that one walk visits: a chain of elementwise ops may be very long.
_FAR = 256


def closure(start: Iterable[Any], step: Callable[[Any], Iterable[Any]]) -> dict[Any, None]:
    """``start``, and all objects that ``step`` leads to from there, directly or not."""
    visited = dict.fromkeys(start)
    todo = list(visited)
    while todo:
        new = [node for node in step(todo.pop()) if node not in visited]
        visited.update(dict.fromkeys(new))
        todo += new
    return visited


def unroll(start: Generator[Any, Any, Any]) -> Any:
    """The result of ``start``, a recursion as generators that yield their calls. A chain of ops may
    be longer than Python's stack is deep."""
    stack, result = [start], None
    while stack:
        try:
            stack.append(stack[-1].send(result))
            result = None
        except StopIteration as done:
            stack.pop()
            result = done.value
    return result


def back_to(first: Node, nodes: Iterable[Node]) -> dict[Node, None]:
    """``nodes`` and the nodes that they are computed from, as far back as ``first``."""
    return closure(nodes, lambda n: [i for i in n.all_input_nodes if not i < first])


def chain(node: Any, through: Callable[[Any], bool] = renames) -> list[Any]:
    """``node``, its input, and so on, while ``through`` holds: by default, up to a view's base."""
    nodes = [node]
    while through(nodes[-1]):
        nodes.append(nodes[-1].all_input_nodes[0])
    return nodes


def base(node: Any, through: Callable[[Any], bool] = renames) -> Any:
    """The last of the ``chain`` of ``node``."""
    return chain(node, through)[-1]


def bare(node: Any) -> Any:
    """The tensor under all views and casts of ``node``."""
    return base(node, renames_or_casts)


def sources(node: Node) -> Iterator[Node]:
    """Yield ``node``, and all nodes that elementwise ops compute it from.

    The last node of the graph comes first, so a caller can stop early: all others are older. A
    residual stream leads back through all layers, on either side of an addition.
    """
    todo = {node}
    for _ in range(_FAR):
        if not todo:
            break
        last = max(todo)
        todo.remove(last)
        yield last
        if last.op == "call_function" and elementwise(last):
            todo.update(last.all_input_nodes)


def source(node: Node) -> Node:
    """The tensor that ``node`` is a view or float32 copy of: epilogues convert while they load."""
    return base(node, lambda n: renames(n) or widens(n))


def widens(node: Any) -> bool:
    """Is ``node`` a cast that keeps all numbers as they are?"""
    if not is_cast(node):
        return False
    before, after = fake(node.all_input_nodes[0]).dtype, fake(node).dtype
    return torch.promote_types(before, after) == after


def readers(node: Node, through: Callable[[Any], bool] = renames) -> tuple[list[Node], list[Node]]:
    """(names, readers): ``node`` and its views for which ``through`` holds; all other readers."""
    visited = {node: None}
    names = [node]
    for name in names:
        new = [u for u in name.users if through(u) and u not in visited]
        visited.update(dict.fromkeys(new))
        names += new
    return names, [u for name in names for u in name.users if u not in visited]


def may_move(node: Node) -> bool:
    """May ``node`` be a view of its input, or is it a copy?"""
    return may_view(node) or node.target is torch.ops.aten.clone.default


def consumer(node: Node) -> Node:
    """``node``; if it is a view or a copy, the first op that reads it."""
    users = readers(node, may_move)[1] if may_move(node) else []
    return users[0] if users else node


def only_reader(node: Node | None, through: Callable[[Any], bool] = lambda _: False) -> Node | None:
    """The only reader of ``node``, or None. Nodes for which ``through`` holds are skipped."""
    users = [] if node is None else readers(node, through)[1]
    return users[0] if len(users) == 1 else None


def leaves(node: Node) -> bool:
    """Is ``node``, or a view of it, a graph output? Then callers see its strides and memory."""
    return any(user.op == "output" for user in readers(node, may_view)[1])


def parts(node: Node) -> dict[int, Node]:
    """The results of ``node`` that are read, by index."""
    return {arguments(u)["index"]: u for u in node.users if u.target is operator.getitem}
