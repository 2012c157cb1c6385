# SPDX-License-Identifier: Apache-2.0
"""One dialect for the many spellings of an operation in a Dynamo (torch-level) graph.

``x.pow(2)``, ``torch.square(x)`` and ``x * x`` are all ``square``; ``x.to(d)``, ``x.float()`` and
``x.type_as(y)`` are all ``cast``; ``operator.add``, ``torch.add`` and ``Tensor.add`` are ``add``.
In-place spellings (``operator.iadd``, ``mul_``) are never normalized: they also write memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.graph.nodes import fake
from coda_inductor.graph.read import Call, of_torch, read
from coda_inductor.matching import columns
from coda_inductor.matching.canon import Canon

COMMUTATIVE = frozenset({"add", "mul"})

#: Methods that are casts, of floating types.
_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
#: Options without effect at this value; with any other value the op is another function.
_NOTHING = {"inplace": False, "dtype": None, "_stacklevel": 3}


def normalize(node: Any) -> Canon | None:
    """``node`` in the common dialect, or None when it is not one of the known operations."""
    call = read(node)
    if call is None or call.op.endswith("_"):
        return None
    method = node.op == "call_method"
    if not method and not of_torch(node.target):
        return None
    op = "cast" if method and call.op in _CASTS else call.op
    special = _SPECIAL.get(op)
    found = None if special is None else special(call)
    return _plain(call) if special is None or (op == "sum" and found is None) else found


def is_cast(node: Any) -> bool:
    """Is ``node`` a cast between floating types?"""
    method = isinstance(node, Node) and node.op == "call_method" and node.target in _CASTS
    return method and normalize(node) is not None


def _plain(call: Call) -> Canon | None:
    args = dict(call.args)
    for option, nothing in _NOTHING.items():
        if args.pop(option, nothing) != nothing:
            return None
    return Canon(call.op, tuple(args.values()))


def as_written(node: Node, canon: Canon | None) -> Canon | None:
    """``node``, whose normal form is ``canon``, without the steps that :func:`normalize` skips: for
    idioms that have only the last of several ops, or write dimensions in another way. None if there
    is no difference.
    """
    if canon is None or not canon.through or (call := read(node)) is None:
        return None
    if canon.op == "rsqrt":
        return Canon("reciprocal", canon.through[:1])
    if call.op == "view":
        return _view_as_written(call)
    return _plain(call) if call.op in ("flatten", "view_as_complex") else None


def _cast(call: Call) -> Canon | None:
    """A pure dtype change between floating types: no device move, no memory format. Not from or to
    eight bits: that is quantization, and torch does not promote these types."""
    if call.get("memory_format") is not None:
        return None
    source, result = fake(call["input"]), fake(call.node)
    if isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor):
        floating = all(t.is_floating_point() and t.element_size() > 1 for t in (source, result))
        if not floating or source.device != result.device or source.stride() != result.stride():
            return None
    return Canon("cast", (call["input"],))


def _sum(call: Call) -> Canon | None:
    """``add`` and ``sub`` without ``alpha``."""
    one = call.get("alpha") in (None, 1)
    return Canon(call.op, (call["input"], call["other"])) if one else None


def _pow(call: Call) -> Canon:
    x, exponent = call["input"], call["exponent"]
    if not isinstance(exponent, Node) and exponent == -1:
        return _inverse(x)
    function = None if isinstance(exponent, Node) else _POWERS.get(exponent)
    return Canon(function, (x,)) if function else Canon("pow", (x, exponent))


#: As torch computes them.
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}


def _div(call: Call) -> Canon | None:
    """``1 / x`` is a reciprocal; ``div`` with a rounding mode is another function."""
    if call.get("rounding_mode") is not None:
        return None
    left, right = call["input"], call["other"]
    one = not isinstance(left, (Node, bool)) and left == 1
    if one and isinstance(right, Node):
        return _inverse(right)
    return Canon("div", (left, right))


def _mul(call: Call) -> Canon:
    left, right = call["input"], call["other"]
    return Canon("square", (left,)) if left is right else Canon("mul", (left, right))


def _inverse(x: Node) -> Canon:
    """1 / ``x``, where ``x`` may be a square root."""
    root = normalize(x) if isinstance(x, Node) else None
    if root is not None and root.op == "sqrt":
        return Canon("rsqrt", root.args, (x, *root.through))
    return Canon("reciprocal", (x,))


def _norm(*names: str) -> Callable[[Call], Canon | None]:
    """``F.rms_norm``, ``F.layer_norm``: over the last dimension only."""

    def canon(call: Call) -> Canon | None:
        shape = call["normalized_shape"]
        one = isinstance(shape, (list, tuple)) and len(shape) == 1
        return Canon(call.op, tuple(call[name] for name in names)) if one else None

    return canon


def _view_as_written(call: Call) -> Canon | None:
    """``view``, ``reshape``: the tensor, then the sizes one by one."""
    sizes = call.get("size")
    if sizes is None:
        return None  # the same bits as numbers of another type
    return Canon("view", (call["input"], *(sizes if isinstance(sizes, (tuple, list)) else [sizes])))


def _loss(call: Call) -> Canon | None:
    """A loss of classes without weights: (input, target, ignore_index, reduction), and the label
    smoothing of a cross entropy."""
    weighted = any(call.get(key) is not None for key in ("weight", "size_average", "reduce"))
    if weighted or isinstance(call["reduction"], int):  # as the aten op has it
        return None
    names = ("input", "target", "ignore_index", "reduction", "label_smoothing")
    return Canon(call.op, tuple(call[name] for name in names if name in call.args))


def _reduction(call: Call) -> Canon | None:
    """A reduction over the last dimension only, with ``keepdim``."""
    kept = call.get("keepdim") is True and call.get("dtype") is None
    last = kept and is_last(call["dim"], call["input"])
    return Canon(f"{call.op}_last", (call["input"],)) if last else None


def is_last(dim: Any, x: Any) -> bool:
    """Is ``dim`` exactly the last dimension of ``x``?"""
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    known = fake(x)
    last = (-1,) if known is None else (-1, known.dim() - 1)
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in last


def _var(call: Call) -> Canon | None:
    """Only the biased variance over the last dimension that keeps it."""
    biased = call.get("correction") == 0 or call.get("unbiased") is False
    last = biased and call.get("keepdim") is True and is_last(call["dim"], call["input"])
    return Canon("var_last", (call["input"],)) if last else None


def _log_softmax(call: Call) -> Canon | None:
    """Only over the last dimension; its ``dtype`` argument is a cast."""
    last = is_last(call["dim"], call["input"])
    return Canon("log_softmax_last", (call["input"],)) if last else None


_SPECIAL: dict[str, Callable[[Call], Canon | None]] = {
    "cast": _cast,
    "cat": columns.joined,
    "stack": columns.joined,
    "flatten": lambda call: columns.merged(call) or _plain(call),
    "getitem": columns.item,
    "view_as_complex": columns.complex_columns,
    "add": _sum,
    "sub": _sum,
    "rsub": _sum,
    "pow": _pow,
    "mul": _mul,
    "div": _div,
    "reciprocal": lambda call: _inverse(call["input"]),
    "mean": _reduction,
    "sum": _reduction,
    "rms_norm": _norm("input", "weight", "eps"),
    "layer_norm": _norm("input", "weight", "bias", "eps"),
    "view": lambda call: columns.merged(call) or _view_as_written(call),
    "cross_entropy": _loss,
    "nll_loss": _loss,
    "log_softmax": _log_softmax,
    "var": _var,
}
