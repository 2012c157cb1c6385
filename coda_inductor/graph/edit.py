# SPDX-License-Identifier: Apache-2.0
"""Insert nodes into graphs and remove them, in order and with meta."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch.fx import Graph, Node, symbolic_trace
from torch.fx.node import map_arg

from coda_inductor.compat import enable_python_dispatcher, storage, tree_leaves
from coda_inductor.graph.nodes import DYNAMO, arguments, aten, fake, is_erased, prims
from coda_inductor.graph.sizes import alike
from coda_inductor.graph.walk import closure

#: Meta keys that carry meaning for later passes (partitioner, profiler, checkpointing).
META_KEYS = (
    "partitioner_tag", "recompute", "ac_graph_id", "seq_nr", "stack_trace", "nn_module_stack",
    "fwd_nn_module_stack", "original_aten", "from_node", "custom", "autograd_backward",
)  # fmt: skip


def insertions(graph: Graph) -> list[Node]:
    """The nodes that :class:`Put` and ``splice`` have inserted into ``graph``, in that order."""
    return vars(graph).setdefault("coda_put", [])


def run(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function (or of the tensor method ``target``) for real or fake values."""
    if isinstance(target, str):
        tensor, *args = args
        target = getattr(tensor, target)
    return target(*args, **kwargs)


def evaluate(target: Any, args: tuple, kwargs: dict, *, like: Node) -> Any:
    """The result of a call of ``target`` for the recorded values of its arguments."""
    mode = fake_mode(args) or fake_mode((like,)) or contextlib.nullcontext()
    # As Dynamo does: in C++, torch 2.11's matmul asks for numbers where sizes are symbolic.
    dispatcher = enable_python_dispatcher if DYNAMO in like.meta else contextlib.nullcontext
    with mode, dispatcher():
        target = getattr(target, "fake", target)
        return run(target, map_arg(args, _recorded), map_arg(kwargs, _recorded))


def _recorded(node: Node) -> Any:
    if node.op == "get_attr" and fake(node) is None:
        return getattr(node.graph.owning_module, str(node.target))
    return fake(node)


def fake_mode(args: Sequence[Any]) -> Any:
    """The mode that recorded the value of any node in ``args``, or None."""
    modes = (getattr(fake(arg), "fake_mode", None) for arg in tree_leaves(args))
    return next(filter(None, modes), None)


class Put:
    """Inserts calls in front of ``like``, or of the node ``before``, with the meta of ``like`` and
    in the dialect of its graph. ``pattern``, (name, occurrence), is counted as fired when an
    epilogue absorbs one of them."""

    def __init__(
        self, like: Node, before: Node | None = None, *, pattern: tuple[str, str] | None = None
    ):
        self.like, self.before, self.pattern = like, before or like, pattern
        self.on_dynamo = DYNAMO in like.meta

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a function or a tensor method, with meta for the partitioner and the
        source line. Returns the node.

        A reshape that copies nothing becomes a view, because the partitioner does not know
        reshapes: it would save a tensor and its view as two, and let the backward pass overwrite
        one while the other is still needed (seen in GPT-2 on a CPU, torch 2.13).
        """
        graph, value = self.like.graph, evaluate(target, args, kwargs, like=self.like)
        with graph.inserting_before(self.before):
            create = graph.call_method if isinstance(target, str) else graph.call_function
            node = create(target, args, kwargs)
        if self.on_dynamo:
            node.meta = {**self.like.meta, DYNAMO: value}
            return node
        insertions(graph).append(node)
        node.meta = {key: self.like.meta[key] for key in META_KEYS if key in self.like.meta}
        node.meta["val"] = value
        if target is aten.reshape.default and storage(fake(node)) == storage(fake(args[0])):
            node.target = aten.view.default
        if self.pattern is not None:
            node.meta["coda_pattern"] = self.pattern
        return node

    def add(self, left: Node, right: Any) -> Node:
        return self(aten.add.Tensor, left, right)

    def mul(self, left: Node, right: Any) -> Node:
        return self(aten.mul.Tensor, left, right)

    def row_sum(self, node: Node) -> Node:
        """The sum over the last dimension, which is kept with size 1."""
        return self(aten.sum.dim_IntList, node, [-1], True)

    def column_sum(self, node: Node) -> Node:
        """The sum over all dimensions but the last. A vector is returned as it is, because aten
        reads an empty list of dimensions as all of them."""
        dims = list(range(fake(node).dim() - 1))
        return self(aten.sum.dim_IntList, node, dims) if dims else node

    def reshape(self, node: Node, sizes: list[Any]) -> Node:
        return self(aten.reshape.default, node, sizes)

    def transpose(self, node: Node) -> Node:
        """Insert the transpose of a matrix."""
        return self(aten.permute.default, node, [1, 0])

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """``node`` in ``dtype``; ``node`` itself if it has that dtype."""
        if fake(node).dtype == dtype:
            return node
        if self.on_dynamo:
            return self("to", node, dtype)
        return self(prims.convert_element_type.default, node, dtype)

    def traced(self, function: Callable[[Any], Any], source: Node) -> Any:
        """Insert the nodes of ``function``, plain torch code, for ``source``."""
        env: dict[Node, Node] = {}
        for step in symbolic_trace(function).graph.nodes:
            args, kwargs = map_arg((step.args, step.kwargs), env.__getitem__)
            if step.op == "output":
                return args[0]
            env[step] = source if step.op == "placeholder" else self(step.target, *args, **kwargs)
        raise AssertionError("a traced function has an output")

    def sizes(self, node: Node) -> list[Any]:
        """The sizes of ``node`` as arguments of a view; symbolic ones are read from ``node``."""
        shape = fake(node).shape
        return [
            self(aten.sym_size.int, node, i) if isinstance(size, torch.SymInt) else size
            for i, size in enumerate(shape)
        ]


def reorder(nodes: Sequence[Node]) -> None:
    """If readers of ``nodes`` stand before ``nodes``, move these and their own readers behind. This
    is cheaper than sorting the whole graph for each rewrite.

    Raises:
        CycleError: there is no such order; without this check, the search would not end.
    """
    if not nodes:
        return
    last = max(nodes)  # later readers need not move
    first = [user for node in nodes for user in node.users if user < node]
    early = closure(first, lambda n: [u for u in n.users if u < last or u == last])
    order = TopologicalSorter({n: [i for i in n.all_input_nodes if i in early] for n in early})
    order.prepare()
    while ready := sorted(order.get_ready()):
        for node in ready:
            inputs = node.all_input_nodes
            if inputs and node < max(inputs):
                max(inputs).append(node)
            order.done(node)


def replace_parts(node: Node, results: Mapping[int, Node] | Sequence[Node]) -> None:
    """Replace the results of ``node`` by ``results``, and erase it."""
    for part in list(node.users):
        part.replace_all_uses_with(results[arguments(part)["index"]])
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def prune(nodes: Sequence[Node], keeps: Callable[[Node], bool] = Node.is_impure) -> None:
    """Erase ``nodes`` without readers, and what only erased nodes read, unless ``keeps`` holds."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        is_call = node.op in ("call_function", "call_method")
        if is_erased(node) or node.users or not is_call or keeps(node):
            continue
        todo += node.all_input_nodes
        node.graph.erase_node(node)


def replace(old: Node, new: Node, keeps: Callable[[Node], bool] = Node.is_impure) -> None:
    """Let all readers of ``old`` read ``new``, except ``new`` itself, and ``prune`` ``old``. Both
    have the same strides: ``layout.relay`` is for others."""
    assert alike(fake(old), fake(new)), f"{new} does not lie in memory as {old} does"
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    prune([old], keeps)


def separate_results(graph: Graph) -> None:
    """Give each result that ``graph`` returns again a tensor of its own, to run op by op. Autograd
    marks tensors, not positions: ``[y.detach(), y]``, made one tensor, would have no gradient."""
    output = graph.output_node()
    results: list[Any] = []
    for result in output.args[0]:
        tensor = isinstance(result, Node) and isinstance(fake(result), torch.Tensor)
        again = tensor and result in results
        results.append(Put(result, output)(aten.alias.default, result) if again else result)
    output.args = (tuple(results),)
