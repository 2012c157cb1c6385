# SPDX-License-Identifier: Apache-2.0
"""Side effects of a node of Dynamo's graph: changes of memory, or of a mode."""

import operator
import re
from collections.abc import Iterable

from torch.fx import Graph, Node

from coda_inductor.compat import HigherOrderOperator, OpOverload, OpOverloadPacket, schema
from coda_inductor.graph import edit
from coda_inductor.graph.aliases import memory
from coda_inductor.graph.layout import relay
from coda_inductor.graph.read import read
from coda_inductor.graph.walk import closure
from coda_inductor.matching.bodies import bindings, bodies, subgraphs
from coda_inductor.refusal import Refusal, refuse

_STATE = {
    "_set_grad_enabled", "set_grad_enabled", "_enter_autocast", "_exit_autocast",
    "_enter_inference_mode", "_exit_inference_mode", "_saved_tensors_hooks_disable",
    "_saved_tensors_hooks_enable", "set_autocast_enabled", "set_autocast_dtype",
}  # fmt: skip
_INPLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imatmul, operator.imod, operator.ipow, operator.iand, operator.ior,
    operator.ixor, operator.ilshift, operator.irshift, operator.setitem, operator.delitem,
}  # fmt: skip
_INPLACE_METHODS = {f"__{op.__name__}__" for op in _INPLACE_OPERATORS}


def mutates(node: Node) -> bool:
    """Does ``node`` change a tensor in place? True if in doubt."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_METHODS
    if node.op != "call_function":
        return False
    if isinstance(node.target, HigherOrderOperator):
        return bool(_written_inside(node))
    if node.target in _INPLACE_OPERATORS or node.kwargs.get("out") is not None:
        return True
    call = read(node)  # F.relu(x, inplace=True), the flag also by position
    if (node.kwargs if call is None else call.args).get("inplace") is True:
        return True
    if isinstance(node.target, OpOverload):
        return _mutable(node.target)
    if isinstance(node.target, OpOverloadPacket):
        packet = node.target
        return any(_mutable(getattr(packet, name)) for name in packet.overloads())
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:
        return False  # and_, or_, not_: named so only because Python reserves the plain word
    return name.endswith("_") and not name.endswith("__")


def _mutable(op: object) -> bool:
    """May an overload change its arguments? True if it has no schema."""
    op_schema = schema(op)
    return op_schema is None or op_schema.is_mutable


def written_nodes(node: Node) -> set[Node]:
    """The nodes that ``node``, which ``mutates``, may write to: its tensors (for a Python operator
    or a method, the first one) and the tensors that these may be views of."""
    if isinstance(node.target, HigherOrderOperator):
        inputs = _written_inside(node)
    elif node.op == "call_method" or node.target in _INPLACE_OPERATORS:
        call = read(node)
        inputs = {*node.all_input_nodes} if call is None else {call["input"]}
    else:
        inputs = set(node.all_input_nodes)
    return {node}.union(*map(_bases, inputs))


def writes_to(node: Node, nodes: Iterable[Node]) -> bool:
    """May ``node`` change one of ``nodes`` in place, also through an input that shares memory?"""
    if not mutates(node):
        return False
    changed = written_nodes(node)
    storages = {s for n in changed for s in memory(n) or ()}
    return any(
        base in changed or not storages.isdisjoint(memory(base) or ())
        for n in nodes
        for base in _bases(n)
    )


def changes_mode(node: Node) -> bool:
    """Does ``node`` switch gradients, autocast or inference mode?"""
    return getattr(node.target, "__name__", "") in _STATE


def replace(node: Node, new: Node) -> None:
    """Let all readers of ``node`` read ``new``. Erase ``node``, and then each node that only erased
    nodes read; nodes that change memory stay."""
    edit.replace(node, new, mutates)


def move(node: Node, new: Node) -> Refusal | None:
    """The same for a ``new`` with other strides. The reason why ``node`` stays if they are seen."""
    why = relay(node, new)
    edit.prune([node, new], mutates)  # the one that nobody reads
    return why


def _bases(node: Node) -> set[Node]:
    return set(closure([node], lambda n: [i for i in n.all_input_nodes if _may_view(n, i)]))


def _written_inside(node: Node) -> set[Node]:
    """The nodes that the graphs of a higher-order operator change. If it has no graphs (a Triton
    kernel, for example), or they are unknown, all its inputs."""
    children, result = subgraphs(node), set()
    for child in children.values():
        if child is None:
            return set(node.all_input_nodes)
        changed = {n for n in changes(child.graph) if n.op == "placeholder"}
        outer = bindings(node, child)
        if changed and outer is None:
            return set(node.all_input_nodes)
        result |= {(outer or {})[n] for n in changed if n in (outer or {})}
    return result if children else set(node.all_input_nodes)


def forward_mode(graph: Graph) -> Refusal | None:
    """The reason if ``graph``, or a checkpointed region in it, uses forward-mode differentiation
    (``make_dual``, ``torch.func.jvp``), which our ops do not have; else None."""
    starts = re.compile("enter_dual_level|make_dual|jvp_increment")
    nodes = (node for body in bodies(graph) for node in body.graph.nodes)
    start = next((n for n in nodes if starts.search(getattr(n.target, "__name__", ""))), None)
    if start is None:
        return None
    text = f"{start.name} uses forward-mode differentiation, which semantic ops do not have"
    return refuse("idiom-form", text)


def changes(graph: Graph) -> set[Node]:
    """All nodes of ``graph`` that in-place ops may write to."""
    return {n for node in graph.nodes if mutates(node) for n in written_nodes(node)}


def _may_view(node: Node, source: Node) -> bool:
    outputs, inputs = memory(node), memory(source)
    return outputs is None or inputs is None or not outputs.isdisjoint(inputs) or mutates(node)
