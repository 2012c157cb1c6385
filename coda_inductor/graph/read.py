# SPDX-License-Identifier: Apache-2.0
"""Calls of nodes in any dialect: an op, and its arguments by the names of torch's schemas.

Dynamo's graphs call functions and methods; joint graphs call overloads of aten; both call our own
ops. All are read in the same way, with defaults filled in::

    torch.sum(x, -1), x.sum(dim=-1), aten.sum.dim_IntList(x, -1)
        sum: input=x, dim=-1, keepdim=False, dtype=None

The called function determines the possible signatures; the first one that the arguments fit counts.
The tensor that schemas call ``self`` is ``input``, as in Python.
"""

import functools
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import OpOverload, OpOverloadPacket, schema

aten = torch.ops.aten

#: Kinds of ops that compute nothing, by their names. Results of "names" have the elements of a
#: tensor in the same order, results of "turns" in another one; "parts" divide a tensor, "selects"
#: take a part of it, "repeats" repeat its elements, and "joins" have elements of several tensors.
#: "copies" may be new memory, "casts" are numbers of another type, "detaches" have no gradient.
_KINDS = {
    "names": "view view_as flatten unflatten unsqueeze squeeze alias",
    "turns": "permute transpose t mT flip",
    "parts": "chunk split split_with_sizes unbind",
    "selects": "narrow select slice",
    "repeats": "expand expand_as repeat repeat_interleave",
    "joins": "cat stack",
    "copies": "clone contiguous",
    "casts": "convert_element_type _to_copy to type type_as float double half bfloat16 int long",
    "detaches": "detach",
}
KINDS = {op: kind for kind, ops in _KINDS.items() for op in ops.split()}

#: Other names of an op, and of an argument. Any other name is its own.
_OPS = {
    "multiply": "mul", "truediv": "div", "true_divide": "div", "floordiv": "floor_divide",
    "reshape": "view", "_unsafe_view": "view", "sym_size": "size", "__eq__": "eq",
}  # fmt: skip
_ARGUMENTS = {
    "self": "input", "tensor": "input", "shape": "size", "split_size_or_sections": "split_size",
    "split_sizes": "split_size", "sections": "index", "indices": "index", "from": "start",
    "train": "training", "src": "source", "mat_a": "input", "mat_b": "mat2",
}  # fmt: skip
#: Names of the first arguments of a function without signature; the others are named by number.
_POSITIONS = ("input", "index", "value")
#: Type of a literal -> the argument types that accept it.
_LITERALS: dict[type, tuple[str, ...]] = {
    bool: ("bool", "number", "Tensor"),
    int: ("int", "float", "number", "Tensor", "List[int]"),
    float: ("float", "number", "Tensor"),
    str: ("str", "Device"),
    torch.dtype: ("ScalarType",),
}


@dataclass(slots=True)
class Call:
    """The call of ``node``: ``op`` with ``args``, in the signature's order and with defaults.
    ``through``: nodes between ``node`` and its arguments that are part of the op."""

    node: Node
    op: str
    args: dict[str, Any]
    through: tuple[Node, ...] = ()

    def to(self, op: str, *through: Node, **args: Any) -> "Call":
        """The same node's call in another form: ``op`` with ``args``."""
        return Call(self.node, op, args, through)

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str) -> Any:
        """The argument ``name``; None if the call has no such argument."""
        return self.args.get(name)


def read(node: Any) -> Call | None:
    """The call of ``node``; None if it calls nothing, or if no signature fits."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    name, signatures = _signatures(node.target)
    if not signatures:
        names = (*_POSITIONS, *map(str, range(len(_POSITIONS), len(node.args))))
        return Call(node, name, {**dict(zip(names, node.args, strict=False)), **node.kwargs})
    args, kwargs = node.args, node.kwargs
    if kwargs:
        kwargs = {_ARGUMENTS.get(key, key): item for key, item in kwargs.items()}
    for signature in signatures:
        if (call_args := signature.bind(args, kwargs, choose=len(signatures) > 1)) is not None:
            return Call(node, name, call_args)
    return None


def change(node: Node, **new: Any) -> None:
    """Set the arguments of ``node`` named in ``new``."""
    call = read(node)
    assert call is not None, f"{node.name} is a call that its signature allows"
    names = list(call.args)
    for name, item in new.items():
        if (index := names.index(name)) < len(node.args):
            node.update_arg(index, item)
        else:
            node.update_kwarg(name, item)


def called(node: Any, *ops: str) -> Call | None:
    """The call of ``node`` if it calls one of ``ops``, without a factor ``alpha``; else None."""
    call = read(node)
    plain = call is not None and call.op in ops and call.get("alpha") in (None, 1)
    return call if plain else None


def op_name(node: Any) -> str:
    """The op that ``node`` calls, without its arguments; empty if it calls nothing. Other ops than
    torch's and Python's have their module's name in front: a custom op may be called ``chunk``."""
    calls = isinstance(node, Node) and node.op in ("call_function", "call_method")
    return _signatures(node.target)[0] if calls else ""


def kind(node: Any) -> str:
    """The kind of ``node`` in :data:`KINDS`; empty if it has none."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if node.target == "view" and torch.dtype in map(type, node.args):  # the same bits
        return ""
    return _kind(node.target)


@functools.lru_cache(4096)
def _kind(target: Any) -> str:
    bits = target is aten.view.dtype
    number = isinstance(target, type)  # int(x), of Python
    return "" if bits or number else KINDS.get(_signatures(target)[0], "")


def _function_name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name if is_torch(function) else f"{getattr(function, '__module__', '')}.{name}"


def is_torch(target: Any) -> bool:
    """Is ``target`` a function of torch, of its aten ops, or of Python's operators?"""
    module = getattr(target, "__module__", None) or "builtins"
    custom = module.startswith("torch._ops.") and module != "torch._ops.aten"
    return not custom and module.split(".")[0] in ("torch", "_operator", "builtins", "math")


class _Signature:
    """One signature: ``parameters``, with their types as schemas write them, if there are types."""

    def __init__(self, parameters: Sequence[Parameter]):
        self.names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.types = {p.name: p.annotation for p in parameters}
        self.defaults = {p.name: p.default for p in parameters}
        self.required = {p.name for p in parameters if p.default is p.empty}
        self.variadic = bool(self.names) and self.types[self.names[-1]] == "List[int]"

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, choose: bool
    ) -> dict[str, Any] | None:
        """All arguments by name; None if they do not fit. ``choose``: the types must fit too."""
        if len(args) == len(self.names) == len(self.types) and not (kwargs or choose):
            return dict(zip(self.names, args, strict=True))
        last = len(self.names) - 1
        if len(args) > last + 1:
            if not self.variadic:
                return None
            args = (*args[:last], args[last:])  # sizes, one by one
        values = dict(zip(self.names, args, strict=False), **kwargs)
        complete = {**self.defaults, **values}
        if len(complete) > len(self.defaults) or not self.required <= values.keys():
            return None
        if choose and not all(_fits(self.types[name], item) for name, item in values.items()):
            return None
        return complete


def _fits(kind: Any, value: Any) -> bool:
    """Can ``value`` be an argument of type ``kind``? Nodes are not checked further."""
    if not isinstance(kind, str) or (value is None and kind.startswith("Optional[")):
        return True
    kind = kind.removeprefix("Optional[")
    if isinstance(value, Node):
        return not kind.startswith(("ScalarType", "Device"))
    if isinstance(value, (list, tuple)):
        return kind.startswith("List")
    allowed = _LITERALS.get(type(value))
    return value is not None and (allowed is None or kind.startswith(allowed))


@functools.lru_cache(4096)
def _signatures(target: Any) -> tuple[str, tuple[_Signature, ...]]:
    """(common name, signatures) of a function, an op, or a tensor method."""
    method = isinstance(target, str)
    function = getattr(torch.Tensor, target, None) if method else target
    name = target if method else _function_name(target)
    if isinstance(target, OpOverload):
        if target.namespace in ("aten", "prims"):
            name = target.overloadpacket.__name__
        return _OPS.get(name, name), (_signature(target),)
    name = _OPS.get(name, name)
    if isinstance(function, types.FunctionType):
        params = inspect.signature(function).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params):
            return name, ()
        aliases = [p.replace(name=_ARGUMENTS.get(p.name, p.name), annotation=None) for p in params]
        return name, (_Signature(aliases),)
    packet = function if isinstance(function, OpOverloadPacket) else getattr(aten, name, None)
    if not isinstance(packet, OpOverloadPacket):  # an attribute of any object, such as "__get__"
        return name, ()
    overloads = (getattr(packet, member) for member in packet.overloads())
    usable = (o for o in overloads if not any(a.is_out for a in schema(o).arguments))
    return name, tuple(_signature(member, method) for member in usable)


def _signature(overload: Any, method: bool = False) -> _Signature:
    parameters = []
    for a in schema(overload).arguments:
        default = a.default_value if a.has_default_value() else Parameter.empty
        kind = Parameter.KEYWORD_ONLY if a.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
        name, annotation = _ARGUMENTS.get(a.name, a.name), str(a.real_type).replace("SymInt", "int")
        parameters.append(Parameter(name, kind, default=default, annotation=annotation))
    return _Signature(sorted(parameters, key=lambda p: method and p.name != "input"))
