# SPDX-License-Identifier: Apache-2.0
"""One dialect for the many spellings of an operation in a Dynamo (torch-level) graph.

``x.pow(2)``, ``torch.square(x)`` and ``x * x`` are all ``square``; ``x.to(d)``, ``x.float()`` and
``x.type_as(y)`` are all ``cast``; ``operator.add``, ``torch.add`` and ``Tensor.add`` are ``add``.
In-place spellings (``operator.iadd``, ``mul_``) are never normalized: they are not the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.matching import columns, rows
from coda_inductor.matching.canon import Canon, named, of_torch, target_name, value

COMMUTATIVE = frozenset({"add", "mul"})

#: Other names of an op. Any other name, torch's or Python's operator's, is the op's own.
_ALIASES = {"multiply": "mul", "truediv": "div", "true_divide": "div", "reshape": "view"}
#: Methods that are casts, of floating types.
_CASTS = dict.fromkeys(("to", "type", "type_as", "float", "half", "bfloat16", "double"), "cast")

#: Functions with options: what may stand after the input, and the default. An option left out and
#: one that says the default are the same spelling. ``inplace=True`` is another function.
_OPTIONS: dict[str, dict[str, Any]] = {
    "clamp": {"min": None, "max": None},
    "clamp_min": {"min": None},
    "clamp_max": {"max": None},
    "elu": {"alpha": 1.0, "inplace": False},
    "gelu": {"approximate": "none"},
    "hardsigmoid": {"inplace": False},
    "hardswish": {"inplace": False},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0, "inplace": False},
    "leaky_relu": {"negative_slope": 0.01, "inplace": False},
    "mish": {"inplace": False},
    "relu": {"inplace": False},
    "relu6": {"inplace": False},
    "softplus": {"beta": 1.0, "threshold": 20.0},
}


def normalize(node: Node) -> Canon | None:
    """``node`` in the common dialect, or None when it is not one of the known operations."""
    method = node.op == "call_method"
    if not (method or (node.op == "call_function" and of_torch(node.target))):
        return None
    name = target_name(node)
    name = _CASTS.get(name, name) if method else name
    name = _ALIASES.get(name, name)
    if not name or name.endswith("_"):
        return None
    special = _SPECIAL.get(name)
    if special is not None:
        found = special(node)
        if found is not None or name != "sum":
            return found
    if name in _OPTIONS:
        return _with_options(name, node)
    allowed = {"inplace": False} if name == "silu" else {"alpha": 1}
    for key, item in node.kwargs.items():
        if allowed.get(key, _MISSING) != item and key not in ("input", "other"):
            return None  # an option that changes the meaning (alpha=, rounding_mode=, out=)
    args = tuple(node.args)
    args += tuple(node.kwargs[k] for k in ("input", "other") if k in node.kwargs)
    if name == "silu":
        if len(args) > 1 and args[1]:  # F.silu(x, inplace=True)
            return None
        args = args[:1]
    if name == "mul" and len(args) == 2:
        return _product(*args)
    return Canon(name, args)


def as_written(node: Node) -> Canon | None:
    """``node`` without what :func:`normalize` looks through: what an idiom reads that spells only
    the last op of several, or spells its dimensions in another way. None if that is nothing else.
    """
    canon = normalize(node)
    if canon is None or not canon.through:
        return None
    if canon.op == "rsqrt":
        return Canon("reciprocal", canon.through[:1])
    name = target_name(node)
    if canon.op in ("mean_last", "mean_row", "sum_last"):
        op = _ALIASES.get(name, name)
        if op in ("mul", "div"):
            return Canon(op, tuple(node.args))
        new = name == "unsqueeze" or node.args[1:] == ((Ellipsis, None),)
        return Canon("unsqueeze", (node.args[0], -1)) if new else None
    if name in ("view", "reshape"):
        return _view_as_written(node)
    if name == "flatten":
        return _flatten_as_written(node)
    return Canon(name, tuple(node.args)) if name == "view_as_complex" else None


_MISSING = object()


def _with_options(name: str, node: Node) -> Canon | None:
    """A function of :data:`_OPTIONS` with every option in its place, given or not; None stands for
    one that has no default."""
    options = _OPTIONS[name]
    given = dict(zip(("input", *options), node.args, strict=False))
    given.update(node.kwargs)
    if set(given) - {"input", *options} or "input" not in given:
        return None
    given = {**options, **given}
    if given.pop("inplace", False):
        return None
    return Canon(name, (given.pop("input"), *(given[key] for key in options if key in given)))


def _cast(node: Node) -> Canon | None:
    """A pure dtype change between floating types: no device move, no memory format. One from or to
    eight bits is none: it quantizes, and torch promotes these types to no others."""
    if node.kwargs.get("memory_format") is not None:
        return None
    source, result = value(node.args[0]), value(node)
    if isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor):
        floating = all(t.is_floating_point() and t.element_size() > 1 for t in (source, result))
        if not floating or source.device != result.device or source.stride() != result.stride():
            return None
    return Canon("cast", (node.args[0],))


def _pow(node: Node) -> Canon:
    exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
    if not isinstance(exponent, Node) and exponent == -1:
        return _inverse(node.args[0])
    function = None if isinstance(exponent, Node) else _POWERS.get(exponent)
    return Canon(function, (node.args[0],)) if function else Canon("pow", (node.args[0], exponent))


#: As torch computes them.
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}


def _div(node: Node) -> Canon | None:
    """``1 / x`` is a reciprocal; ``div`` that rounds is another function."""
    given = named(node, "input", "other", "rounding_mode", rounding_mode=None)
    if given is None or given["rounding_mode"] is not None:
        return None
    left, right = given["input"], given["other"]
    one = not isinstance(left, (Node, bool)) and left == 1
    if one and isinstance(right, Node):
        return _inverse(right)
    return _averaged(left, right) or Canon("div", (left, right))


def _product(left: Any, right: Any) -> Canon:
    if left is right:
        return Canon("square", (left,))
    for total, share in ((left, right), (right, left)):
        if isinstance(share, float) and (mean := _averaged(total, share, of_one=True)):
            return mean
    return Canon("mul", (left, right))


def _averaged(total: Any, count: Any, *, of_one: bool = False) -> Canon | None:
    """The sum of a row over how many columns it has, a literal, is its mean; ``of_one``: times one
    over that."""
    canon = normalize(total) if isinstance(total, Node) else None
    if canon is None or canon.op not in _MEANS or isinstance(count, (Node, bool)):
        return None
    recorded = value(canon.args[0])
    width = recorded.shape[-1] if isinstance(recorded, torch.Tensor) else None
    if not isinstance(width, int) or not width or count != (1 / width if of_one else width):
        return None
    return Canon(_MEANS[canon.op], canon.args, (total, *canon.through))


_MEANS = {"sum_last": "mean_last", "sum_row": "mean_row"}


def _reciprocal(node: Node) -> Canon | None:
    given = named(node, "input")
    return None if given is None else _inverse(given["input"])


def _inverse(x: Node) -> Canon:
    """One over ``x``, which may be a root."""
    root = normalize(x) if isinstance(x, Node) else None
    if root is not None and root.op == "sqrt":
        return Canon("rsqrt", root.args, (x, *root.through))
    return Canon("reciprocal", (x,))


def _unsqueeze(node: Node) -> Canon | None:
    """A last dimension of one, also as ``x[..., None]``; a mean that gets it back has kept it."""
    if target_name(node) == "getitem":
        source, dim = node.args[0], -1
    else:
        given = named(node, "input", "dim")
        if given is None:
            return None
        source, dim = given["input"], given["dim"]
    known = value(source)
    last = dim == -1 or (known is not None and dim == known.dim())
    canon = normalize(source) if last and isinstance(source, Node) else None
    if canon is not None and canon.op in _KEPT:
        return Canon(_KEPT[canon.op], canon.args, (source, *canon.through))
    return Canon("unsqueeze", (source, dim))


_KEPT = {"mean_row": "mean_last", "sum_row": "sum_last"}


def _rms_norm(node: Node) -> Canon | None:
    """``F.rms_norm(x, shape, weight, eps)`` over the last dimension only."""
    given = named(node, "input", "normalized_shape", "weight", "eps", weight=None, eps=None)
    if given is None or not _one_dimension(given["normalized_shape"]):
        return None
    return Canon("rms_norm", (given["input"], given["weight"], given["eps"]))


def _one_dimension(shape: Any) -> bool:
    return isinstance(shape, (list, tuple, torch.Size)) and len(shape) == 1


def _view(node: Node) -> Canon | None:
    """``view``, ``reshape``: the tensor, then the sizes one by one."""
    return columns.merged(node) or _view_as_written(node)


def _view_as_written(node: Node) -> Canon | None:
    if node.kwargs or not node.args:
        return None
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = tuple(sizes[0])
    if any(isinstance(size, torch.dtype) for size in sizes):
        return None  # the same bits as numbers of another type
    return Canon("view", (node.args[0], *sizes))


def _flatten(node: Node) -> Canon | None:
    return columns.merged(node) or _flatten_as_written(node)


def _flatten_as_written(node: Node) -> Canon | None:
    return None if node.kwargs else Canon("flatten", tuple(node.args))


def _loss(name: str, smoothing: dict[str, Any]) -> Callable[[Node], Canon | None]:
    """A loss of classes without weights: (input, target, ignore_index, reduction), and what
    ``smoothing`` names."""
    options = {"ignore_index": -100, "reduction": "mean", **smoothing}
    old = dict.fromkeys(("weight", "size_average", "reduce"))
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")

    def canon(node: Node) -> Canon | None:
        given = named(node, *names, *smoothing, **old, **options)
        if given is None or any(given[key] is not None for key in old):
            return None
        return Canon(name, (given["input"], given["target"], *(given[key] for key in options)))

    return canon


def _log_softmax(node: Node) -> Canon | None:
    """Only over the last dimension; a dtype that it computes in is a cast."""
    names = ("input", "dim", "dtype") if node.op == "call_method" else _LOG_SOFTMAX
    given = named(node, *names, dim=None, **dict.fromkeys(names[2:]))
    if given is None or not rows.is_last(given["dim"], given["input"]):
        return None
    return Canon("log_softmax_last", (given["input"],))


_LOG_SOFTMAX = ("input", "dim", "_stacklevel", "dtype")


def _layer_norm(node: Node) -> Canon | None:
    """``F.layer_norm(x, shape, weight, bias, eps)`` over the last dimension only."""
    names = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
    given = named(node, *names, weight=None, bias=None, eps=1e-5, cudnn_enable=None)
    if given is None or not _one_dimension(given["normalized_shape"]):
        return None
    return Canon("layer_norm", tuple(given[key] for key in ("input", "weight", "bias", "eps")))


def _item(node: Node) -> Canon | None:
    """One of the two that ``var_mean`` returns, or a new dimension; else columns."""
    source, index = node.args
    if index == (Ellipsis, None):
        return _unsqueeze(node)
    if not isinstance(source, Node) or target_name(source) != "var_mean":
        return columns.item(node)
    given = named(source, "input", "dim", "unbiased", "keepdim", "correction", **rows.VAR)
    if given is None or not rows.biased(given) or index not in (0, 1):
        return None
    return Canon(("var_last", "mean_last")[index], (given["input"],), (source,))


_SPECIAL: dict[str, Callable[[Node], Canon | None]] = {
    "cast": _cast,
    "cat": columns.joined,
    "stack": columns.joined,
    "flatten": _flatten,
    "getitem": _item,
    "select": columns.select,
    "narrow": columns.narrow,
    "view_as_complex": columns.complex_columns,
    "pow": _pow,
    "div": _div,
    "reciprocal": _reciprocal,
    "mean": rows.along("mean"),
    "sum": rows.along("sum"),
    "unsqueeze": _unsqueeze,
    "rms_norm": _rms_norm,
    "view": _view,
    "cross_entropy": _loss("cross_entropy", {"label_smoothing": 0.0}),
    "nll_loss": _loss("nll_loss", {}),
    "log_softmax": _log_softmax,
    "var": rows.var,
    "layer_norm": _layer_norm,
}
