# SPDX-License-Identifier: Apache-2.0
"""What a node says, whatever its dialect: an op, and its arguments by the names of torch's schemas.

Dynamo's graphs call functions and methods, joint graphs aten's overloads, both the project's own
ops. All are read alike, an option that is left out as its default::

    torch.sum(x, -1), x.sum(dim=-1), aten.sum.dim_IntList(x, -1)
        sum: input=x, dim=-1, keepdim=False, dtype=None

What a node calls says which signatures there are; of several, the first that its arguments fit
counts. The tensor that schemas call ``self`` is ``input``, as in Python.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import OpOverload, OpOverloadPacket, schema

#: Other names of an op, and of an argument. Any other name is its own.
_OPS = {"multiply": "mul", "truediv": "div", "true_divide": "div", "reshape": "view"}
_ARGUMENTS = {
    "self": "input", "tensor": "input", "shape": "size", "split_size_or_sections": "split_size",
    "split_sizes": "split_size", "sections": "indices_or_sections",
    "indices": "indices_or_sections",
}  # fmt: skip
#: The first arguments of what tells no signature; the others are named by their number.
_UNTOLD = ("input", "other")
#: Of a literal's type, the types of arguments that it may be given for.
_LITERALS: dict[type, tuple[str, ...]] = {
    bool: ("bool", "number", "Tensor"),
    int: ("int", "float", "number", "Tensor", "List[int]"),
    float: ("float", "number", "Tensor"),
    str: ("str", "Device"),
    torch.dtype: ("ScalarType",),
}


@dataclass(frozen=True)
class Call:
    """What ``node`` calls: ``op`` of ``args``, in the signature's order, defaults filled in."""

    node: Node
    op: str
    args: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str) -> Any:
        """The argument of that name; None for a call that has none."""
        return self.args.get(name)


def read(node: Any) -> Call | None:
    """What ``node`` calls; None for what calls nothing, or in a way that no signature allows."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    name, known = op_name(node), _signatures(node.target)
    if not known:
        names = (*_UNTOLD, *map(str, range(len(_UNTOLD), len(node.args))))
        return Call(node, name, {**dict(zip(names, node.args, strict=False)), **node.kwargs})
    kwargs = {_ARGUMENTS.get(key, key): item for key, item in node.kwargs.items()}
    found = (_bound(signature, node.args, kwargs) for signature in known)
    given = next((given for given in found if given is not None), None)
    return None if given is None else Call(node, name, given)


def op_name(node: Node) -> str:
    """The common name of what ``node`` calls."""
    name = target_name(node)
    if isinstance(node.target, OpOverload):
        ours = node.target.namespace in ("aten", "prims", "coda_inductor")
        name = node.target.overloadpacket.__name__ if ours else name
    return _OPS.get(name, name)


def target_name(node: Node) -> str:
    """The name of the function or method that ``node`` calls; empty for what calls nothing. What
    is neither torch's nor Python's has its module's name in front: a custom op may be called
    ``chunk`` too."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if of_torch(node.target) else f"{getattr(node.target, '__module__', '')}.{name}"


def of_torch(target: Any) -> bool:
    """Is ``target`` a function of torch, of its aten ops, or of Python's operators?"""
    module = getattr(target, "__module__", None) or "builtins"
    custom = module.startswith("torch._ops.") and module != "torch._ops.aten"
    return not custom and module.split(".")[0] in ("torch", "_operator", "builtins", "math")


@functools.lru_cache(4096)
def _signatures(target: Any) -> tuple[Signature, ...]:
    """The signatures of a function, an op or the method of that name; none where nobody tells."""
    method = isinstance(target, str)
    function = getattr(torch.Tensor, target, None) if method else target
    if isinstance(function, types.FunctionType):
        found = inspect.signature(function).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
            return ()
        return (Signature([p.replace(name=_ARGUMENTS.get(p.name, p.name)) for p in found]),)
    if isinstance(target, OpOverload):
        return (_of_schema(target, method),)
    packet = target if isinstance(target, OpOverloadPacket) else None
    if packet is None and (method or of_torch(target)):
        name = target if method else target.__name__
        packet = getattr(torch.ops.aten, _OPS.get(name, name), None)
    each = () if packet is None else (getattr(packet, name) for name in packet.overloads())
    return tuple(_of_schema(o, method) for o in each if not _writes(o))


def _writes(overload: Any) -> bool:
    return any(argument.is_out for argument in schema(overload).arguments)


def _of_schema(overload: Any, method: bool) -> Signature:
    """Types are those of schemas, as they are written. ``method``: the tensor comes first, wherever
    the schema has it."""
    found = []
    for a in schema(overload).arguments:
        default = a.default_value if a.has_default_value() else Parameter.empty
        kind = Parameter.KEYWORD_ONLY if a.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
        name, of = _ARGUMENTS.get(a.name, a.name), str(a.real_type).replace("SymInt", "int")
        found.append(Parameter(name, kind, default=default, annotation=of))
    return Signature(sorted(found, key=lambda p: method and p.name != "input"))


def _bound(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """All arguments by name; None where they do not fit."""
    places = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if places and len(args) > len(places) and places[-1].annotation == "List[int]":
        args = (*args[: len(places) - 1], args[len(places) - 1 :])  # sizes, one by one
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    given = bound.arguments.items()
    if not all(_fits(signature.parameters[name].annotation, item) for name, item in given):
        return None
    bound.apply_defaults()
    return bound.arguments


def _fits(kind: Any, given: Any) -> bool:
    """Python's functions say nothing of types that one could count on."""
    if isinstance(given, Node) or not isinstance(kind, str):
        return True
    optional = kind.startswith("Optional[")
    kind = kind[len("Optional[") : -1] if optional else kind
    if given is None:
        return optional
    if isinstance(given, (list, tuple)):
        return kind.startswith("List")
    return kind in _LITERALS.get(type(given), (kind,))
