# SPDX-License-Identifier: Apache-2.0
"""Aten ops in Dynamo's graph, as exported programs are written, become functions again.

Before::

    to = torch.ops.aten.to.dtype(x, torch.float32); pow_1 = torch.ops.aten.pow.Tensor_Scalar(to, 2)
    mean = torch.ops.aten.mean.dim(pow_1, [-1], True); ...
    torch.ops.aten._assert_tensor_metadata.default(to, dtype=torch.float32)

After::

    to = x.to(torch.float32); pow_1 = torch.pow(to, 2); mean = torch.mean(pow_1, [-1], True); ...

Why it is valid: functions and methods of torch's C++ side are generated from the same schemas, and
call the op of their name with their arguments; the few others are listed here one by one. An
assertion on a tensor's dtype, device and layout is dropped if it holds for the recorded value.

What it enables: patterns, attention masks and all other passes on this graph need one spelling.

Leaves alone, silently, because the graph does not get worse: ops that change their arguments, ops
without a function in torch, and core ops that ``run_decompositions`` leaves.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.compat import OpOverload, schema
from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.matching import bodies
from coda_inductor.record import Record

#: How a node calls: a function or the name of a method, arguments, keyword arguments.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

#: Functions of ``torch.nn.functional``, with the number of leading arguments that they share with
#: the op of their name.
_FUNCTIONS = {
    "silu": 1, "gelu": 1, "linear": 3, "mish": 1, "softplus": 3, "elu": 2, "leaky_relu": 2,
    "hardtanh": 3, "hardswish": 1, "hardsigmoid": 1, "relu6": 1, "relu": 1, "glu": 2,
    "scaled_dot_product_attention": 6,
}  # fmt: skip
_OPERATORS = {"__and__": operator.and_, "__or__": operator.or_}
_REDUCTIONS = ("none", "mean", "sum")


def respell(graph: Graph, _record: Record) -> None:
    """Rename the aten calls of ``graph`` and its checkpointed regions, in place."""
    for body in bodies(graph):
        for node in [n for n in body.graph.nodes if _aten(n)]:
            _respell(node)


def spelled_in_aten(graph: Graph, _record: Record) -> bool:
    """Is there anything to do?"""
    return any(_aten(node) for body in bodies(graph) for node in body.graph.nodes)


def _aten(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _respell(node: Node) -> None:
    said = schema(node.target)
    if said is None or said.is_mutable:
        return
    name = node.target.overloadpacket.__name__
    if name == "_assert_tensor_metadata":
        if _holds(node):
            node.graph.erase_node(node)
        return
    call = _SPECIAL[name](node) if name in _SPECIAL else _same(node, name)
    if call is None:
        return
    node.target, node.args, node.kwargs = call
    node.op = "call_method" if isinstance(node.target, str) else "call_function"


def _same(node: Node, name: str) -> Call | None:
    """The call of torch's function or method ``name``, if it takes the same arguments."""
    if name in _OPERATORS:
        return _OPERATORS[name], node.args, node.kwargs
    if name in _FUNCTIONS:
        takes = len(node.args) <= _FUNCTIONS[name]
        return (getattr(F, name), node.args, node.kwargs) if takes else None
    if isinstance(builtin := getattr(torch, name, None), types.BuiltinFunctionType):
        return builtin, node.args, node.kwargs
    method = getattr(torch.Tensor, name, None)
    known = isinstance(method, types.MethodDescriptorType)
    return (name, node.args, node.kwargs) if known and node.args else None


def _holds(node: Node) -> bool:
    """Is ``_assert_tensor_metadata`` true while tracing? Then it is true at every call, because it
    asserts no sizes."""
    said = _said(node)
    known = fake(said.pop("a"))
    if not isinstance(known, torch.Tensor) or not set(said) <= {"dtype", "device", "layout"}:
        return False
    device = torch.device(said.pop("device", known.device))
    same = device.type == known.device.type and device.index in (None, known.device.index)
    return same and all(getattr(known, key) == want for key, want in said.items())


def _said(node: Node) -> dict[str, Any]:
    """The arguments of ``node`` that are set."""
    return {name: item for name, item in arguments(node).items() if item is not None}


def _to(node: Node) -> Call | None:
    """``x.to``, which has no layout argument: a node that changes the layout is left alone."""
    said = _said(node)
    x = said.pop("input")
    own = said.pop("layout", None) in (None, getattr(fake(x), "layout", None))
    return ("to", (x,), said) if own and not said.pop("pin_memory", None) else None


def _taken(node: Node) -> Call | None:
    """``slice`` and ``select``: whole dimensions, then the selection in one."""
    x, dim, *item = arguments(node).values()
    known = fake(x)
    if not isinstance(known, torch.Tensor) or not isinstance(dim, int):
        return None
    if len(item) > 1:
        default = 0, 2**63 - 1, 1
        same = (isinstance(a, int) and a == b for a, b in zip(item, default, strict=True))
        item = [slice(*(None if is_same else a for a, is_same in zip(item, same, strict=True)))]
    return operator.getitem, (x, (*(slice(None),) * (dim % known.dim()), *item)), {}


def _index(node: Node) -> Call | None:
    """``index(x, [None, i])``: None is a whole dimension here, and a new one in ``x[None, i]``. A
    tensor without dimensions is a number in Python's spelling."""
    x, items = arguments(node).values()
    if not all(i is None or getattr(fake(i), "ndim", 0) for i in items):
        return None
    return operator.getitem, (x, tuple(slice(None) if i is None else i for i in items)), {}


def _cross_entropy(node: Node) -> Call | None:
    said = _said(node)
    said["reduction"] = _REDUCTIONS[said["reduction"]]
    return F.cross_entropy, (said.pop("input"), said.pop("target")), said


_SPECIAL: dict[str, Callable[[Node], Call | None]] = {
    "to": _to, "slice": _taken, "select": _taken, "index": _index,
    "sym_size": lambda node: ("size", node.args, node.kwargs),
    "cross_entropy_loss": _cross_entropy,
}  # fmt: skip
