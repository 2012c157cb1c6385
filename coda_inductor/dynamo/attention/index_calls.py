# SPDX-License-Identifier: Apache-2.0
"""How a node of a Dynamo graph is called: its op's plain name, its literals, its value for numbers.

Whatever is not understood raises ``NotProvenError``: ``index_proof`` reads calls through here only.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import unset_fake_temporarily
from coda_inductor.dynamo.attention.index_values import Choice, NotProvenError, Number, constant
from coda_inductor.matching import value

#: Ops of which no argument but the filling number says what the elements are.
FILLED = {
    "ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0,
    "full": None, "full_like": None, "new_full": None,
}  # fmt: skip
_SPELLINGS = {
    "and_": "and", "bitwise_and": "and", "logical_and": "and",
    "or_": "or", "bitwise_or": "or", "logical_or": "or",
    "invert": "not", "inv": "not", "bitwise_not": "not", "logical_not": "not",
    "type": "to", "bool": "to", "int": "to", "long": "to", "float": "to", "half": "to",
    "bfloat16": "to", "double": "to", "contiguous": "to", "clone": "to", "detach": "to",
    "cpu": "to", "cuda": "to", "type_as": "to",
    "unsqueeze": "reshape", "view": "reshape", "squeeze": "reshape", "flatten": "reshape",
    "repeat": "expand", "expand_as": "expand", "broadcast_to": "expand",
    "multiply": "mul", "subtract": "sub", "negative": "neg", "swapaxes": "transpose",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
}  # fmt: skip


def op_name(node: Node) -> str:
    """The op of ``node`` in one spelling; with its module if it is neither torch's nor Python's."""
    name = str(node.target)
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if node.target not in (getattr(operator, name, None), getattr(torch, name, None)):
            return f"{getattr(node.target, '__module__', '')}.{name}"  # only named like ours
    elif name.startswith("__"):
        name = name.strip("_")  # torch 2.11 records == of two tensors as a call of __eq__
    return _SPELLINGS.get(name, name)


def fill(node: Node, name: str) -> Choice:
    """What a call of ``name``, one of ``FILLED``, fills its tensor with."""
    number: Any = FILLED[name]
    if number is None:
        number = node.args[-1] if "fill_value" not in node.kwargs else node.kwargs["fill_value"]
    if not isinstance(number, (bool, int, float)):
        raise NotProvenError("it is filled with a value that is not known while compiling")
    return constant(converted(number, None, value(node).dtype))


def run(node: Node, numbers: list[Number]) -> Number:
    """One element of an elementwise ``node`` whose arguments, in order, are ``numbers``."""

    def given(arg: Any) -> Any:
        number = next(rest)
        like = value(arg)
        if not isinstance(like, torch.Tensor):
            return number
        # A tensor without dimensions promotes types like a number does.
        return torch.full((1,) * min(like.dim(), 1), number, dtype=like.dtype, device="cpu")

    rest = iter(numbers)
    with unset_fake_temporarily(), torch.no_grad():
        args = [given(arg) for arg in node.args]
        kwargs = {key: given(arg) for key, arg in node.kwargs.items()}
        try:
            if node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            raise NotProvenError(f"evaluating it failed: {error}") from error
        return result.to(value(node).dtype).item()


def converted(number: Number, source: torch.dtype | None, to: torch.dtype) -> Number:
    """``number``, of dtype ``source`` or a literal, as a tensor of dtype ``to`` holds it."""
    with unset_fake_temporarily():
        try:
            return torch.full((), number, dtype=source or to, device="cpu").to(to).item()
        except (RuntimeError, OverflowError) as error:
            raise NotProvenError(f"evaluating it failed: {error}") from error


def arguments(node: Node, *names: str, **defaults: Any) -> list[Any]:
    """The arguments of ``node`` by ``names``, given by position, by name or by default."""
    allow(node, set(names))
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    if len(node.args) > len(names) or set(given) != set(names):
        raise NotProvenError(f"{op_name(node)} is called in a way that its proof does not know")
    return [given[name] for name in names]


def allow(node: Node, names: set[str]) -> None:
    """Refuse keyword arguments other than ``names``."""
    if extra := set(node.kwargs) - names:
        raise NotProvenError(f"{op_name(node)} is called with {', '.join(sorted(extra))}")


def literal(arg: Any) -> int:
    """An integer that is the same at every call."""
    known = value(arg) if isinstance(arg, Node) else arg
    if isinstance(known, bool) or not isinstance(known, int):
        raise NotProvenError(f"it computes with {known}, whose value is symbolic or no integer")
    return known


def not_negative(arg: Any) -> int:
    """A ``literal`` that counts from the front."""
    if (number := literal(arg)) < 0:
        raise NotProvenError("it counts elements from the end")
    return number
