# SPDX-License-Identifier: Apache-2.0
"""Who else sees the memory of a tensor?

Most ops read elements by their indices: they give the same result for any strides. Some read memory
as it lies (:func:`inspected`), under any of the tensor's names. Only ``layout.relay`` gives a
tensor other strides, and not if such an op reads it. ``pipeline`` compares what these ops read
before and after each pass (``layout.layouts``).

And an input may be written to, by the graph or by the caller after it (:func:`mark_writes`).
AOTAutograd places such writes after all reads of the old value, but the backward pass runs later
still: it must not read that input, see ``memory.partition.keep_old_inputs``.
"""

import torch
from torch.fx import Graph, Node

from coda_inductor import compat
from coda_inductor.graph.nodes import DYNAMO, aten, fake, may_view
from coda_inductor.graph.read import is_torch, kind, op_name
from coda_inductor.graph.walk import closure

#: Ops of torch whose result depends on the strides or on the storage of a tensor.
_BY_MEMORY = {
    "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "set_", "resize",
    "resize_", "resize_as_", "stride", "sym_stride", "storage_offset", "sym_storage_offset",
    "is_contiguous", "data_ptr", "untyped_storage",
}  # fmt: skip
#: Operators with graphs inside that read elements.
_BY_ELEMENT = ("flex_attention", "flex_attention_backward")
#: Libraries whose ops read elements; others may have promised strides to their ops.
_LIBRARIES = ("aten", "prims", "inductor", "inductor_prims", "coda_inductor", "_c10d_functional")
#: Meta key of an input that is written to.
WRITTEN = "coda_written"


def inspected(node: Node) -> list[Node]:
    """The inputs of ``node`` of which it sees how they lie in memory. All if in doubt. Callers see
    the strides of graph outputs; torch promises fixed strides to custom ops without the tag
    ``flexible_layout``, and to Triton kernels."""
    name = op_name(node)
    first = name in _BY_MEMORY or (name == "view" and not kind(node))  # view(dtype)
    if not first and not _by_memory(node):
        return []
    inputs = [n for n in compat.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
    return inputs[:1] if first else inputs


def _by_memory(node: Node) -> bool:
    target = node.target
    if node.op not in ("call_function", "call_method"):
        return node.op in ("output", "call_module")
    if isinstance(target, compat.HigherOrderOperator):
        return target.name() not in _BY_ELEMENT
    if isinstance(target, compat.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, compat.OpOverload):
        return target.namespace not in _LIBRARIES and torch.Tag.flexible_layout not in target.tags
    return node.op == "call_function" and not is_torch(target)


def memory(node: Node) -> set[int] | None:
    """The storages of the recorded value, which views share; None if no value is recorded."""
    value = fake(node)
    if value is None:
        return None
    try:
        return {compat.storage(t) for t in compat.tree_leaves(value) if isinstance(t, torch.Tensor)}
    except NotImplementedError:  # sparse tensors have none
        return None


def shares(user: Node, node: Node) -> bool:
    """May ``user``, which reads ``node``, share its memory?"""
    if DYNAMO not in node.meta:
        return may_view(user)
    new, old = memory(user), memory(node)
    return new is None or old is None or not new.isdisjoint(old)


def names(node: Node) -> dict[Node, None]:
    """``node``, and all later nodes that may share its memory."""
    return closure([node], lambda name: [user for user in name.users if shares(user, name)])


def spectator(node: Node) -> Node | None:
    """The first node that sees the memory of ``node``, under any of its names, or None."""
    aliases = names(node)
    readers = (user for name in aliases for user in name.users if name in inspected(user))
    return min(readers, default=None)


def mark_writes(graph: Graph, *, later: bool = False) -> None:
    """Mark the inputs of an aten graph that are written to. ``later``: the caller may write to some
    when the graph has run; AOTAutograd lets the graph read nothing but a copy of these."""
    for node in graph.find_nodes(op="placeholder"):
        copied = later and [user.target for user in node.users] == [aten.clone.default]
        if copied or any(_writes(u, name) for name in names(node) for u in name.users):
            node.meta[WRITTEN] = True


def _writes(node: Node, name: Node) -> bool:
    op_schema = compat.schema(node.target)
    if op_schema is None or not op_schema.is_mutable:
        return False
    args = dict(zip((a.name for a in op_schema.arguments), node.args, strict=False)) | node.kwargs
    to = [a.name for a in op_schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return any(name in compat.tree_leaves(args.get(argument)) for argument in to)


def old_values(graph: Graph) -> dict[Node, None]:
    """The nodes of an aten graph that are computed from the memory of an input before it is written
    to, and have memory of their own."""
    inputs = (n for n in graph.find_nodes(op="placeholder") if n.meta.get(WRITTEN))
    aliases = {name: None for node in inputs for name in names(node)}
    users = (user for name in aliases for user in name.users if user.op == "call_function")
    return {u: None for u in users if u not in aliases and not any(_writes(u, n) for n in aliases)}
