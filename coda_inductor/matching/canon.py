# SPDX-License-Identifier: Apache-2.0
"""What the matcher reads of one node: its op in the common dialect, and its recorded value."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node


class Canon(NamedTuple):
    """A node in the common dialect: op name and its significant arguments. ``through``: nodes
    between the node and its arguments that are part of the op."""

    op: str
    args: tuple[Any, ...]
    through: tuple[Node, ...] = ()


def target_name(node: Node) -> str:
    """The name of the function or method that ``node`` calls; empty for what calls nothing."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def value(node: Any) -> Any:
    """The fake value of a node of Dynamo's graph, under Dynamo's own key, or under AOTAutograd's,
    as nested regions have them; None for anything else. ``graph.nodes.fake`` reads aten graphs."""
    if not isinstance(node, Node):
        return None
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    return None


def named(node: Node, *names: str, **defaults: Any) -> dict[str, Any] | None:
    """The arguments of ``node`` by ``names``, given by place or by name; None where one without a
    default is missing, or another one is given."""
    if len(node.args) > len(names):
        return None
    given = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given if set(given) == set(names) else None
