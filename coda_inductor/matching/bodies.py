# SPDX-License-Identifier: Apache-2.0
"""The graphs inside a Dynamo graph, above all checkpointed regions, which run as if inlined."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from coda_inductor.graph.read import op_name

_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_REGIONS = (*_CHECKPOINTS, "invoke_subgraph")


@dataclass(frozen=True, eq=False)
class Body:
    """One graph. ``outer`` maps its placeholders to the nodes that ``around``'s graph passes, if
    these are the same at every call; it is empty for the outermost graph."""

    module: GraphModule
    around: "Body | None" = None
    outer: dict[Node, Node] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.module.graph


def bodies(graph: Graph, around: Body | None = None) -> Iterator[Body]:
    """``graph`` and the bodies of its checkpoint and nested_compile_region calls, outermost first.

    Other nested graphs (flex_attention's score_mod, cond branches) differ, and are left out.
    """
    gm = graph.owning_module
    assert isinstance(gm, GraphModule), "Dynamo's graph has an owner"
    body = around or Body(gm)
    yield body
    callers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if op_name(node) in _REGIONS:
            for target in subgraphs(node):
                callers.setdefault(target, []).append(node)
    for target, calls in callers.items():
        child = getattr(gm, target, None)
        if isinstance(child, GraphModule):
            outer = bindings(calls[0], child) if len(calls) == 1 else None
            yield from bodies(child.graph, Body(child, body, outer or {}))


def subgraphs(node: Node) -> dict[str, GraphModule | None]:
    """The graphs that a call takes, by names in the enclosing module; None for a missing one."""
    names = [str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr"]
    graphs = {name: _attribute(node.graph.owning_module, name) for name in names}
    return {
        name: child if isinstance(child, GraphModule) else None
        for name, child in graphs.items()
        if isinstance(child, GraphModule | None)  # else a tensor
    }


def _attribute(module: object, name: str) -> object:
    """The attribute ``name`` (with dots) of ``module``, or None."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def bindings(call: Node, child: GraphModule) -> dict[Node, Node] | None:
    """Placeholders of ``child`` -> the arguments of ``call``; None if the mapping is uncertain. It
    is certain only for calls of checkpointed regions."""
    placeholders = [n for n in child.graph.nodes if n.op == "placeholder"]
    args = call.args[1:]
    if op_name(call) not in _CHECKPOINTS or len(args) != len(placeholders):
        return None
    return {p: a for p, a in zip(placeholders, args, strict=True) if isinstance(a, Node)}
