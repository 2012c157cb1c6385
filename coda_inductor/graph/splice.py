# SPDX-License-Identifier: Apache-2.0
"""Put what a function does into an aten graph.

A function of the same tensors (dtypes, sizes, strides) does the same: it is traced once, and copied
from then on, into other graphs too. A layer of FP8 has some thirty scales, all alike; tracing each
took half of all our time. The same is compiled again for the pieces into which a graph breaks, and
each trace costs more the more modules Python has: torch changes ``nn.Module`` meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from coda_inductor.compat import (
    inductor_config,
    schema,
    select_decomp_table,
    storage,
    tree_flatten,
    tree_unflatten,
)
from coda_inductor.graph.edit import KEPT_META, fake_mode
from coda_inductor.graph.nodes import fake

#: Traced graphs by what they depend on, the one that was used last at the end. Their values are
#: :class:`Like` s: a recorded value would keep alive all that its graph has recorded.
_TRACED: OrderedDict[Hashable, Graph] = OrderedDict()
_MOST = 1024
#: Attribute of a fake mode: the settings under which its graph is compiled.
_SETTINGS = "coda_settings"


@dataclass(frozen=True)
class Like:
    """What a tensor that owns its memory is like."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def new(self) -> torch.Tensor:
        """One more."""
        new = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)
        return new.requires_grad_(self.requires_grad)


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

    Raises:
        RuntimeError: the function made a constant tensor.
    """
    flat, spec = tree_flatten(list(args))
    nodes = [a for a in flat if isinstance(a, Node)]
    mode = fake_mode(nodes)
    traced = _traced(function, flat, spec, mode)
    kept = {key: like.meta[key] for key in KEPT_META if key in like.meta} | (meta or {})
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
                copied = env[node] = graph.node_copy(node, env.__getitem__)
                copied.meta = {**node.meta, **kept}
                copied.meta["val"] = _value(copied, mode)
    return result


def _traced(function: Callable[..., Any], flat: list[Any], spec: Any, mode: Any) -> Graph:
    key = None if mode is None else _key(function, flat, spec, mode)
    if key is None:
        return _trace(function, flat, spec)
    traced = _TRACED.pop(key, None)  # another thread may compile, and trace it too
    if traced is None:
        traced = _remembered(_trace(function, flat, spec))
    _TRACED[key] = traced
    while len(_TRACED) > _MOST:
        _TRACED.popitem(last=False)
    return traced


def _trace(function: Callable[..., Any], flat: list[Any], spec: Any) -> Graph:
    slots = [i for i, a in enumerate(flat) if isinstance(a, Node)]

    def call(*tensors: Any) -> Any:
        values = list(flat)
        for slot, tensor in zip(slots, tensors, strict=True):
            values[slot] = tensor
        return function(*tree_unflatten(values, spec))

    table = select_decomp_table()
    return make_fx(call, decomposition_table=table)(*(fake(flat[slot]) for slot in slots)).graph


def _remembered(graph: Graph) -> Graph:
    """A copy of ``graph`` without recorded values, and without the module that owns it: every one
    of those is a class of its own, all of which torch visits when it changes ``nn.Module``."""
    copy, env = Graph(), dict[Node, Node]()
    copy.output(copy.graph_copy(graph, env))
    for old, new in env.items():
        value = new.meta.pop("val", None)
        if isinstance(value, torch.Tensor) and not _views(old):
            sizes, strides = tuple(value.shape), value.stride()
            like = Like(sizes, strides, value.dtype, value.device, value.requires_grad)
            new.meta["val"] = like
    return copy


def _key(function: Callable[..., Any], flat: list[Any], spec: Any, mode: Any) -> Hashable | None:
    """What the trace depends on; None where that is not known: sizes are symbolic, or two tensors
    share memory, which a function may ask for."""
    if _SETTINGS not in vars(mode):
        setattr(mode, _SETTINGS, _settings())
    parts: list[Hashable] = [function, spec, getattr(mode, _SETTINGS)]
    storages = []
    for value in flat:
        if not isinstance(value, Node):
            if not isinstance(value, Hashable):
                return None
            parts.append((type(value), value))
            continue
        x = fake(value)
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            return None
        sizes = (*x.shape, *x.stride(), x.storage_offset())
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return None
        parts.append((sizes, x.dtype, x.device, x.requires_grad))
        storages.append(storage(x))
    return tuple(parts) if len({*storages}) == len(storages) else None


class _Settings:
    """What decompositions and functions may ask for, beside their arguments. Compared by its hash
    first: there are hundreds of values."""

    def __init__(self, values: tuple[Hashable, ...]):
        self.values, self.hash = values, hash(values)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self.values == other.values


def _settings() -> _Settings:
    plain = (bool, int, float, str, type(None))
    inductor = inductor_config.get_config_copy().items()
    return _Settings(
        (
            tuple((name, value) for name, value in inductor if isinstance(value, plain)),
            frozenset(select_decomp_table().items()),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )
    )


def _views(node: Node) -> bool:
    """May a result of ``node`` be memory of an argument?"""
    known = schema(node.target)
    return known is None or any(argument.alias_info is not None for argument in known.arguments)


def _value(node: Node, mode: Any) -> Any:
    """A value of its own for a copied node: recorded ones tell which tensors share memory."""
    like = node.meta.get("val")
    if like is not None and not isinstance(like, Like):
        return like  # traced for this graph alone
    with mode:
        if isinstance(like, Like):
            return like.new()
        return node.target(*map_arg(node.args, fake), **map_arg(node.kwargs, fake))
