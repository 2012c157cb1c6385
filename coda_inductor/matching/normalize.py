# SPDX-License-Identifier: Apache-2.0
"""One dialect for the many spellings of an operation in a Dynamo (torch-level) graph.

``x.pow(2)``, ``torch.square(x)`` and ``x * x`` are all ``square``; ``x.to(d)``, ``x.float()`` and
``x.type_as(y)`` are all ``cast``; ``operator.add``, ``torch.add`` and ``Tensor.add`` are ``add``.
In-place spellings (``operator.iadd``, ``mul_``), which also write memory, are never normalized.
"""

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from coda_inductor.graph.nodes import fake, is_cast
from coda_inductor.graph.read import Call, is_torch, kind, read
from coda_inductor.matching import columns

COMMUTATIVE = frozenset({"add", "mul"})

#: Options without effect at this value; with any other value the op is another function.
_NOTHING = {"inplace": False, "dtype": None, "_stacklevel": 3}


def normalize(node: Any) -> Call | None:
    """``node`` in the common dialect, or None if it is not one of the known operations."""
    call = read(node)
    if call is None or call.op.endswith("_"):
        return None
    if node.op == "call_function" and not is_torch(node.target):
        return None
    op = "cast" if kind(node) == "casts" else call.op
    special = _SPECIAL.get(op)
    result = None if special is None else special(call)
    return _plain(call) if special is None or (op == "sum" and result is None) else result


def _plain(call: Call) -> Call | None:
    args = dict(call.args)
    for option, nothing in _NOTHING.items():
        if args.pop(option, nothing) != nothing:
            return None
    return call.to(call.op, **args)


def literal_call(node: Node, normal: Call | None) -> Call | None:
    """``node``, whose normal form is ``normal``, without the steps that :func:`normalize` skips. An
    idiom may have only the last of several ops, or other dimensions. None if nothing differs."""
    if normal is None or not normal.through or (call := read(node)) is None:
        return None
    if normal.op == "rsqrt":
        return call.to("reciprocal", input=normal.through[0])
    if call.op == "view":
        return _literal_view(call)
    return _plain(call) if call.op in ("flatten", "view_as_complex") else None


def _cast(call: Call) -> Call | None:
    """A cast between floating types, or any cast in an idiom, which has no recorded types; or None.
    Casts from or to 8 bits are quantization, and torch does not promote these types."""
    untyped = fake(call.node) is None and call.get("memory_format") is None
    return call.to("cast", input=call["input"]) if untyped or is_cast(call.node) else None


def _sum(call: Call) -> Call | None:
    """``add`` or ``sub``; None with an ``alpha``."""
    unscaled = call.get("alpha") in (None, 1)
    return call.to(call.op, input=call["input"], other=call["other"]) if unscaled else None


def _pow(call: Call) -> Call:
    x, exponent = call["input"], call["exponent"]
    if not isinstance(exponent, Node) and exponent == -1:
        return _inverse(call, x)
    function = None if isinstance(exponent, Node) else _POWERS.get(exponent)
    return call.to(function, input=x) if function else call.to("pow", input=x, exponent=exponent)


#: As torch computes them.
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}


def _div(call: Call) -> Call | None:
    """``1 / x`` as a reciprocal, other divisions as ``div``; None with a rounding mode."""
    if call.get("rounding_mode") is not None:
        return None
    left, right = call["input"], call["other"]
    is_one = not isinstance(left, (Node, bool)) and left == 1
    if is_one and isinstance(right, Node):
        return _inverse(call, right)
    return call.to("div", input=left, other=right)


def _mul(call: Call) -> Call:
    left, right = call["input"], call["other"]
    if left is right:
        return call.to("square", input=left)
    return call.to("mul", input=left, other=right)


def _inverse(call: Call, x: Node) -> Call:
    """The normal form of ``call``, which computes 1 / ``x``; ``x`` may be a square root."""
    root = normalize(x) if isinstance(x, Node) else None
    if root is not None and root.op == "sqrt":
        return call.to("rsqrt", x, *root.through, input=root["input"])
    return call.to("reciprocal", input=x)


def _rms_norm(call: Call) -> Call | None:
    """RMSNorm over the last dimension; None for others."""
    shape = call["normalized_shape"]
    if not isinstance(shape, (list, tuple)) or len(shape) != 1:
        return None
    return call.to(call.op, **{name: call[name] for name in ("input", "weight", "eps")})


def _literal_view(call: Call) -> Call | None:
    """``view`` or ``reshape`` as the tensor, then the sizes one by one; None for a dtype."""
    sizes = call.get("size")
    if sizes is None:
        return None  # the same bits as numbers of another type
    sizes = sizes if isinstance(sizes, (tuple, list)) else [sizes]
    return call.to("view", input=call["input"], **{str(i): n for i, n in enumerate(sizes)})


def _loss(call: Call) -> Call | None:
    """A loss of classes without weights as (input, target, ignore_index, reduction), and the label
    smoothing of a cross entropy; None for others."""
    weighted = any(call.get(key) is not None for key in ("weight", "size_average", "reduce"))
    if weighted or isinstance(call["reduction"], int):  # as the aten op has it
        return None
    names = ("input", "target", "ignore_index", "reduction", "label_smoothing")
    return call.to(call.op, **{name: call[name] for name in names if name in call.args})


def _reduction(call: Call) -> Call | None:
    """A reduction over only the last dimension, to (..., 1) or (...); None for others."""
    last = call.get("dtype") is None and is_last(call.get("dim"), call["input"])
    kind = "last" if call.get("keepdim") is True else "of_rows"
    return call.to(f"{call.op}_{kind}", input=call["input"]) if last else None


def is_last(dim: Any, x: Any) -> bool:
    """Is ``dim`` exactly the last dimension of ``x``?"""
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    tensor = fake(x)
    last = (-1,) if tensor is None else (-1, tensor.dim() - 1)
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in last


def _var(call: Call) -> Call | None:
    """The biased variance over the last dimension, which it keeps; None for others."""
    biased = call.get("correction") == 0 or call.get("unbiased") is False
    last = biased and call.get("keepdim") is True and is_last(call["dim"], call["input"])
    return call.to("var_last", input=call["input"]) if last else None


def _softmax(call: Call) -> Call | None:
    """A softmax or its logarithm over the last dimension; None for others."""
    last = is_last(call["dim"], call["input"])
    return call.to(f"{call.op}_last", input=call["input"]) if last else None


_SPECIAL: dict[str, Callable[[Call], Call | None]] = {
    "cast": _cast,
    "flatten": lambda call: columns.merge(call) or _plain(call),
    "view": lambda call: columns.merge(call) or _literal_view(call),
    "view_as_complex": columns.complex_columns,
    **dict.fromkeys(("cat", "stack"), columns.join),
    **dict.fromkeys(("getitem", "select", "slice"), columns.item),
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "reciprocal": lambda call: _inverse(call, call["input"]),
    **dict.fromkeys(("mean", "sum", "logsumexp"), _reduction),
    "var": _var,
    **dict.fromkeys(("log_softmax", "softmax"), _softmax),
    "rms_norm": _rms_norm,
    **dict.fromkeys(("cross_entropy", "nll_loss"), _loss),
}
