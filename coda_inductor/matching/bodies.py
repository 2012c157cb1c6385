"""The graphs inside a Dynamo graph that run as if they stood in it: checkpointed regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_REGIONS = (*_CHECKPOINTS, "invoke_subgraph")


@dataclass(frozen=True)
class Body:
    """One graph. ``outer``: its placeholders -> what the graph of ``around`` passes for each, where
    that is one and the same at every call; empty for the outermost graph."""

    module: GraphModule
    around: Body | None = None
    outer: dict[Node, Node] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.module.graph


def bodies(gm: GraphModule, around: Body | None = None) -> Iterator[Body]:
    """``gm`` and the bodies of its checkpoint and nested_compile_region calls, outermost first.

    Other nested graphs (flex_attention's score_mod, cond branches) have semantics of their own and
    are left out.
    """
    body = around or Body(gm)
    yield body
    callers: dict[str, list[tuple[str, Node]]] = {}
    for node in gm.graph.nodes:
        name = str(getattr(node.target, "_name", getattr(node.target, "__name__", "")))
        if name in _REGIONS:
            for arg in node.args:
                if isinstance(arg, Node) and arg.op == "get_attr":
                    callers.setdefault(str(arg.target), []).append((name, node))
    for target, calls in callers.items():
        child = getattr(gm, target, None)
        if isinstance(child, GraphModule):
            outer = _outer(child, *calls[0]) if len(calls) == 1 else {}
            yield from bodies(child, Body(child, body, outer))


def _outer(child: GraphModule, name: str, call: Node) -> dict[Node, Node]:
    """Placeholders -> arguments of the only call of ``child``."""
    placeholders = [n for n in child.graph.nodes if n.op == "placeholder"]
    passed = call.args[1:]
    if name not in _CHECKPOINTS or len(passed) != len(placeholders):
        return {}
    return {p: a for p, a in zip(placeholders, passed, strict=True) if isinstance(a, Node)}
