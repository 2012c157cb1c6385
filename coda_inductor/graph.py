# SPDX-License-Identifier: Apache-2.0
"""Small helpers for aten graphs: insert nodes with fake values, look through views, splice code."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_map

aten = torch.ops.aten
prims = torch.ops.prims

#: Meta keys that carry meaning for later passes (partitioner, profiler, checkpointing).
_KEPT_META = (
    "partitioner_tag", "recompute", "ac_graph_id", "seq_nr", "stack_trace", "nn_module_stack",
    "fwd_nn_module_stack", "original_aten", "from_node", "custom", "autograd_backward",
)  # fmt: skip

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)

#: Ops that only rename a value: same memory, same elements in the same order. A clone is none: who
#: clones wants memory of its own.
ALIASES = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default,
        aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default,
    }
)  # fmt: skip


def fake(node: Any) -> Any:
    """The fake value of a node; anything else passes through."""
    return node.meta.get("val") if isinstance(node, Node) else node


def same(left: Any, right: Any) -> bool:
    """Are two sizes (or shapes) equal for certain? Never adds a guard."""
    if isinstance(left, (tuple, list, torch.Size)):
        return len(left) == len(right) and all(map(same, left, right))
    return statically_known_true(left == right)


def row_major(tensor: torch.Tensor) -> bool:
    """Is ``tensor`` contiguous for certain? A kernel stores rows; users keep their strides."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * (1 if same(size, 0) else size)
    return True


def is_cast(node: Any) -> bool:
    """A pure dtype change between the float types that epilogues compute through."""
    if not isinstance(node, Node) or node.target not in (
        prims.convert_element_type.default,
        aten._to_copy.default,
    ):
        return False
    source, result = fake(node.args[0]), fake(node)
    if source is None or result is None or source.device != result.device:
        return False
    differs = source.dtype != result.dtype  # else it is a copy
    return differs and source.dtype in FLOATS and result.dtype in FLOATS


def is_transpose(node: Any) -> bool:
    """Does ``node`` swap the two dimensions of a matrix?"""
    return (
        isinstance(node, Node)
        and node.target is aten.permute.default
        and list(node.args[1]) == [1, 0]
    )


def elementwise(node: Node) -> bool:
    """Is ``node`` computed element by element, be it by an aten op, a view or a semantic op?"""
    if node.target is operator.getitem:
        node = node.args[0]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or node.target in ALIASES or is_cast(node)


def readers(node: Node, *, through: Callable[[Node], bool]) -> tuple[list[Node], list[Node]]:
    """(names, readers): ``node`` and what only renames it, as ``through`` says, in turn; and every
    other node that reads one of these."""
    names = [node]
    for name in names:
        names += [u for u in name.users if through(u) and u not in names]
    return names, [u for name in names for u in name.users if u not in names]


def leaves(node: Node) -> bool:
    """Is ``node``, or a view of it, an output of the graph? Callers see its strides, and what it
    shares memory with."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user not in seen and _views(user):
                seen.add(user)
                todo.append(user)
    return False


def _views(node: Node) -> bool:
    """May the result of ``node`` share memory with what it reads?"""
    if node.target in ALIASES or node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def insert(
    graph: Graph, target: Any, args: tuple, kwargs: dict | None = None, *, like: Node
) -> Node:
    """Call ``target`` at the graph's insertion point; value and meta as a traced node has them.

    Meta that steers the partitioner and names the source line is copied from ``like``.
    """
    node = graph.call_function(target, args, kwargs or {})
    node.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    mode = _fake_mode(args) or _fake_mode((like,))
    fake_args = tree_map(fake, args)
    if mode is None or target is operator.getitem:
        node.meta["val"] = target(*fake_args, **(kwargs or {}))
    else:
        with mode:
            node.meta["val"] = target(*fake_args, **(kwargs or {}))
    return node


class CycleError(RuntimeError):
    """A rewrite made a node depend on itself."""


def settle(nodes: Sequence[Node]) -> None:
    """Move what reads ``nodes`` after them, and what reads that, where it stands before: cheaper
    than sorting a whole graph for each rewrite.

    Raises:
        CycleError: there is no such order. Looking for one would never end.
    """
    moving = _readers_before(nodes)
    for node in _in_order(moving):
        last = max((n for n in node.all_input_nodes), default=None)
        if last is not None and node < last:
            last.append(node)


def _readers_before(nodes: Sequence[Node]) -> set[Node]:
    """The readers of ``nodes`` that stand before them, and all that reads those and stands before
    the last of ``nodes``: beyond it nothing has to move."""
    found: set[Node] = set()
    if not nodes:
        return found
    last = max(nodes)
    todo = [user for node in nodes for user in node.users if user < node]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [user for user in node.users if user < last or user == last]
    return found


def _in_order(nodes: set[Node]) -> list[Node]:
    """``nodes``, each after those of them that it reads."""
    waits = {node: sum(n in nodes for n in node.all_input_nodes) for node in nodes}
    ready = sorted((node for node, count in waits.items() if not count), reverse=True)
    order: list[Node] = []
    while ready:
        node = ready.pop()
        order.append(node)
        for user in node.users:
            if user in waits:
                waits[user] -= 1
                if not waits[user]:
                    ready.append(user)
    if len(order) < len(nodes):
        stuck = min(node for node, count in waits.items() if count)
        raise CycleError(f"{stuck.name} would depend on itself")
    return order


def prune(nodes: Sequence[Node]) -> None:
    """Erase those of ``nodes`` that nobody reads, and then what only they read."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node._erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        todo += node.all_input_nodes
        node.graph.erase_node(node)


class Put:
    """Inserts nodes with the meta of one traced node. ``pattern``, a name and an occurrence, is
    what counts as fired when an epilogue absorbs one of them."""

    def __init__(self, graph: Graph, *, like: Node, pattern: tuple[str, str] | None = None):
        self.graph, self.like, self.pattern = graph, like, pattern

    def __call__(self, target: Any, *args: Any) -> Node:
        node = insert(self.graph, target, args, like=self.like)
        if self.pattern is not None:
            node.meta["coda_pattern"] = self.pattern
        return node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """``node`` in ``dtype``; itself if it is so already."""
        if fake(node).dtype == dtype:
            return node
        return self(prims.convert_element_type.default, node, dtype)

    def sizes(self, node: Node) -> list[Any]:
        """The sizes of ``node`` as a view's arguments; symbolic ones are read from ``node``."""
        shape = fake(node).shape
        return [
            self(aten.sym_size.int, node, i) if isinstance(size, torch.SymInt) else size
            for i, size in enumerate(shape)
        ]


def _fake_mode(args: Sequence[Any]) -> Any:
    for arg in torch.utils._pytree.tree_leaves(args):
        mode = getattr(fake(arg), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def splice(
    graph: Graph,
    before: Node,
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    like: Node,
    meta: dict[str, Any] | None = None,
) -> Any:
    """Trace ``function`` on the fake values of ``args``; put its aten nodes before ``before``.

    Returns what the function returns, as nodes; ``meta`` is added to each. Decompositions are
    Inductor's: the result is what it would have compiled had the user written the function's body.
    """
    from torch._inductor.decomposition import select_decomp_table

    flat, spec = torch.utils._pytree.tree_flatten(list(args))
    slots = [i for i, a in enumerate(flat) if isinstance(a, Node)]
    nodes = [flat[i] for i in slots]

    def call(*tensors: Any) -> Any:
        values = list(flat)
        for slot, tensor in zip(slots, tensors, strict=True):
            values[slot] = tensor
        return function(*torch.utils._pytree.tree_unflatten(values, spec))

    traced = make_fx(call, decomposition_table=select_decomp_table())(*map(fake, nodes))
    env: dict[Node, Node] = {}
    inputs = iter(nodes)
    result: Any = None
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "output":
                result = torch.fx.node.map_arg(node.args[0], env.__getitem__)
            elif node.op == "get_attr":
                raise RuntimeError(f"{function.__name__} captured a constant tensor: {node.target}")
            else:
                copied = graph.node_copy(node, env.__getitem__)
                kept = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
                copied.meta = {**node.meta, **kept, **(meta or {})}
                env[node] = copied
    return result


def refresh_views(graph: Graph) -> None:
    """Let the recorded value of every view share memory with that of what it is a view of now.

    Where a node was replaced, the views of it keep the old one's. Torch reads from these values
    what it may write over: a saved tensor that an output is a view of must not look like its own.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not _views(node) or not node.args:
            continue
        source, result = _storages(fake(node.args[0])), _storages(fake(node))
        if not result or result <= source:
            continue
        mode = _fake_mode(node.args)
        with mode if mode is not None else contextlib.nullcontext():
            arguments = tree_map(fake, (node.args, dict(node.kwargs)))
            node.meta["val"] = node.target(*arguments[0], **arguments[1])


def _storages(value: Any) -> set[int]:
    tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    strided = [t for t in tensors if t.layout == torch.strided]
    return {t.untyped_storage()._cdata for t in strided}


def snapshot(graph: Graph) -> Graph:
    """A copy of ``graph``, the meta of its nodes included, for :func:`restore`."""
    copied = Graph()
    output = copied.output(copied.graph_copy(graph, {}))
    output.meta = dict(graph.output_node().meta)
    return copied


def restore(graph: Graph, kept: Graph) -> None:
    """Make ``graph`` again what it was at ``kept = snapshot(graph)``, whatever state it is in:
    between two steps of a pass nodes may stand in front of what they read. Placeholders, which no
    pass of ours touches, stay the nodes they are: torch keeps more of them than their meta."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    others = [n for n in graph.nodes if n.op != "placeholder"]
    for node in others:
        node.args, node.kwargs = (), {}
    for node in others:
        graph.erase_node(node)
    known: dict[Node, Node] = {}
    for old, node in zip(kept.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta = dict(old.meta)
        known[old] = node
    output = graph.output(graph.graph_copy(kept, known))
    output.meta = dict(kept.output_node().meta)


def module_path(node: Node) -> str:
    """The dotted path of the module that ``node`` came from, or an empty string."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"^[LG]\['\w+'\]\.?|^L__self___", "", str(list(stack.values())[-1][0]))
    return path.replace("_modules['", "").replace("']", "")
