# SPDX-License-Identifier: Apache-2.0
"""Insert the ops of a function into an aten graph.

For equal tensors (dtypes, sizes, strides) a function has equal ops: it is traced once for each fake
mode, that is for each graph, and copied afterwards. An FP8 layer has some thirty equal scales.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from coda_inductor.compat import schema, select_decomp_table, storage, tree_flatten, tree_unflatten
from coda_inductor.graph.edit import META_KEYS, evaluate, fake_mode, insertions
from coda_inductor.graph.nodes import fake
from coda_inductor.semantic.define import UncertainError, properties

#: Attribute of a fake mode: the traces under it, by function and arguments. A dictionary outside of
#: the mode would keep the mode alive, because every recorded value refers to it.
_TRACES = "coda_traced"


def splice(
    before: Node,
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    like: Node | None = None,
    meta: dict[str, Any] | None = None,
) -> Any:
    """Trace ``function`` on the fake values of ``args``; put its aten nodes before ``before``.

    Returns the function's results as nodes. Each has the meta of ``like``, by default of
    ``before``, and ``meta``. Decompositions are Inductor's, as of the user's own ops.

    Raises:
        RuntimeError: the function created a constant tensor.
    """
    graph, like = before.graph, like or before
    flat, spec = tree_flatten(list(args))
    nodes = [a for a in flat if isinstance(a, Node)]
    mode, key = fake_mode(nodes), _key(function, flat, spec)
    traces: dict[Hashable, Graph] = {}
    if mode is not None and key is not None:
        traces = vars(mode).setdefault(_TRACES, traces)
    cached = key in traces
    with contextlib.nullcontext() if mode is None else mode:  # for constants that it creates too
        traced = traces[key] if cached else traces.setdefault(key, _trace(function, flat, spec))
    extra = {key: like.meta[key] for key in META_KEYS if key in like.meta} | (meta or {})
    env: dict[Node, Node] = {}
    inputs = iter(nodes)
    result: Any = None
    with graph.inserting_before(before):
        for node in traced.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "output":
                result = map_arg(node.args[0], env.__getitem__)
            elif node.op == "get_attr":
                raise RuntimeError(f"{function.__name__} captured a constant tensor: {node.target}")
            else:
                copy = env[node] = graph.node_copy(node, env.__getitem__)
                insertions(graph).append(copy)
                copy.meta = {**node.meta, **extra}
                if cached:
                    copy.meta["val"] = _new_value(copy, mode)
    return result


def _trace(function: Callable[..., Any], flat: list[Any], spec: Any) -> Graph:
    slots = [i for i, a in enumerate(flat) if isinstance(a, Node)]

    def call(*tensors: Any) -> Any:
        values = list(flat)
        for slot, tensor in zip(slots, tensors, strict=True):
            values[slot] = tensor
        return function(*tree_unflatten(values, spec))

    table = select_decomp_table()
    return make_fx(call, decomposition_table=table)(*(fake(flat[slot]) for slot in slots)).graph


def _key(function: Callable[..., Any], flat: list[Any], spec: Any) -> Hashable | None:
    """The key of the trace. None if it is uncertain, because sizes are symbolic, or because two
    tensors share memory, which a function may test."""
    values = [fake(value) for value in flat]
    pairs = zip(flat, values, strict=True)
    if any(isinstance(a, Node) != isinstance(x, torch.Tensor) for a, x in pairs):
        return None
    try:
        parts = properties(values)
    except UncertainError:
        return None
    storages = [storage(value) for value in values if isinstance(value, torch.Tensor)]
    return (function, spec, parts) if len({*storages}) == len(storages) else None


def _new_value(node: Node, mode: Any) -> Any:
    """A new fake value for a copied node: recorded values show which tensors share memory."""
    old, op_schema = node.meta["val"], schema(node.target)
    views = op_schema is None or any(a.alias_info is not None for a in op_schema.arguments)
    if views or not isinstance(old, torch.Tensor):
        return evaluate(node.target, node.args, node.kwargs, like=node)
    with mode:
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device)
        return new.requires_grad_(old.requires_grad)
