# SPDX-License-Identifier: Apache-2.0
"""One dialect for the many spellings of an operation in a Dynamo (torch-level) graph.

``x.pow(2)``, ``torch.square(x)`` and ``x * x`` are all ``square``; ``x.to(d)``, ``x.float()`` and
``x.type_as(y)`` are all ``cast``; ``operator.add``, ``torch.add`` and ``Tensor.add`` are ``add``.
In-place spellings (``operator.iadd``, ``mul_``) are never normalized: they are not the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from coda_inductor.matching import columns
from coda_inductor.matching.canon import Canon, target_name, value

COMMUTATIVE = frozenset({"add", "mul"})

_FUNCTIONS: dict[Any, str] = {
    operator.gt: "gt", operator.ge: "ge", operator.lt: "lt", operator.le: "le",
    operator.abs: "abs", operator.getitem: "getitem",
    operator.add: "add", torch.add: "add", operator.mul: "mul", torch.mul: "mul",
    torch.multiply: "mul", operator.sub: "sub", torch.sub: "sub",
    operator.truediv: "div", torch.div: "div", torch.true_divide: "div",
    operator.neg: "neg", torch.neg: "neg", operator.pow: "pow", torch.pow: "pow",
    torch.square: "square", torch.rsqrt: "rsqrt", torch.sqrt: "sqrt",
    torch.reciprocal: "reciprocal", torch.mean: "mean", torch.sigmoid: "sigmoid",
    torch.reshape: "view",
    F.sigmoid: "sigmoid", F.silu: "silu", torch.ops.aten.silu.default: "silu",
    torch.rms_norm: "rms_norm", F.rms_norm: "rms_norm", torch.var: "var",
    torch.layer_norm: "layer_norm", F.layer_norm: "layer_norm",
}  # fmt: skip
_METHODS = {
    "add": "add", "mul": "mul", "multiply": "mul", "sub": "sub", "div": "div",
    "true_divide": "div", "neg": "neg", "pow": "pow", "square": "square", "rsqrt": "rsqrt",
    "sqrt": "sqrt", "reciprocal": "reciprocal", "mean": "mean", "var": "var",
    "sigmoid": "sigmoid", "to": "cast", "type": "cast", "type_as": "cast", "float": "cast",
    "half": "cast", "bfloat16": "cast", "double": "cast", "reshape": "view",
}  # fmt: skip

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
    if node.op == "call_function":
        name = _FUNCTIONS.get(node.target) or _torch_name(node.target)
    elif node.op == "call_method":
        name = _METHODS.get(str(node.target), str(node.target))
    else:
        return None
    if name is None or name.endswith("_"):
        return None
    special = _SPECIAL.get(name)
    if special is not None:
        return special(node)
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
    if name == "mul" and len(args) == 2 and args[0] is args[1]:
        return Canon("square", (args[0],))
    return Canon(name, args)


def as_written(node: Node) -> Canon | None:
    """``node`` without what :func:`normalize` looks through: what an idiom reads that spells only
    the last op of several, or spells its dimensions in another way. None if that is nothing else.
    """
    canon = normalize(node)
    if canon is None or not canon.through:
        return None
    name = target_name(node)
    if name in ("view", "reshape"):
        return _view_as_written(node)
    if name == "flatten":
        return _flatten_as_written(node)
    return Canon(name, tuple(node.args)) if name == "view_as_complex" else None


_MISSING = object()


def _torch_name(target: Any) -> str | None:
    """The plain name of a function of torch's own that is not in the tables, e.g. ``sin``."""
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    known = module.startswith("torch") or getattr(torch, name, None) is target
    return name if name and known else None


def _with_options(name: str, node: Node) -> Canon | None:
    """A function of :data:`_OPTIONS` with every option in its place, given or not."""
    options = _OPTIONS[name]
    named = dict(zip(("input", *options), node.args, strict=False))
    named.update(node.kwargs)
    if set(named) - {"input", *options} or "input" not in named:
        return None
    named = {**options, **named}
    if named.pop("inplace", False):
        return None
    return Canon(name, (named.pop("input"), *(named[key] for key in options if key in named)))


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
    if not isinstance(exponent, Node) and exponent == 2:
        return Canon("square", (node.args[0],))
    return Canon("pow", (node.args[0], exponent))


def _mean(node: Node) -> Canon | None:
    """Only a mean over the last dimension that keeps it."""
    named = dict(zip(("input", "dim", "keepdim"), node.args, strict=False))
    named.update(node.kwargs)
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return None
        dim = dim[0]
    source = value(named["input"])
    last = (-1,) if source is None else (-1, source.dim() - 1)
    if dim not in last or keepdim is not True or set(named) - {"input", "dim", "keepdim", "dtype"}:
        return None
    return Canon("mean_last", (named["input"],))


def _rms_norm(node: Node) -> Canon | None:
    """``F.rms_norm(x, shape, weight, eps)`` over the last dimension only."""
    named = dict(zip(("input", "normalized_shape", "weight", "eps"), node.args, strict=False))
    named.update(node.kwargs)
    shape = named.get("normalized_shape")
    if not isinstance(shape, (list, tuple, torch.Size)) or len(shape) != 1:
        return None
    return Canon("rms_norm", (named["input"], named.get("weight"), named.get("eps")))


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


def _cross_entropy(node: Node) -> Canon | None:
    """``F.cross_entropy`` without class weights: (input, target, ignore_index, reduction,
    label_smoothing)."""
    names = (
        *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
        "label_smoothing",
    )
    named = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if any(named.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return None
    if "input" not in named or "target" not in named:
        return None
    defaults = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    options = [named.get(name, default) for name, default in defaults.items()]
    return Canon("cross_entropy", (named["input"], named["target"], *options))


def _var(node: Node) -> Canon | None:
    """Only the biased variance over the last dimension that keeps it."""
    named = dict(zip(("input", "dim", "unbiased", "keepdim"), node.args, strict=False))
    named.update(node.kwargs)
    dim = named.get("dim")
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    source = value(named["input"])
    last = (-1,) if source is None else (-1, source.dim() - 1)
    if isinstance(dim, bool) or dim not in last or named.get("keepdim") is not True:
        return None
    biased = named.get("correction") == 0 or named.get("unbiased") is False
    known = {"input", "dim", "unbiased", "correction", "keepdim"}
    return Canon("var_last", (named["input"],)) if biased and set(named) <= known else None


def _layer_norm(node: Node) -> Canon | None:
    """``F.layer_norm(x, shape, weight, bias, eps)`` over the last dimension only."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    named = dict(zip(names, node.args, strict=False))
    named.update(node.kwargs)
    shape = named.get("normalized_shape")
    if not isinstance(shape, (list, tuple, torch.Size)) or len(shape) != 1:
        return None
    source = named["input"]
    return Canon(
        "layer_norm", (source, named.get("weight"), named.get("bias"), named.get("eps", 1e-5))
    )


_SPECIAL: dict[str, Callable[[Node], Canon | None]] = {
    "cast": _cast,
    "cat": columns.joined,
    "stack": columns.joined,
    "flatten": _flatten,
    "getitem": columns.item,
    "select": columns.select,
    "narrow": columns.narrow,
    "view_as_complex": columns.complex_columns,
    "pow": _pow,
    "mean": _mean,
    "rms_norm": _rms_norm,
    "view": _view,
    "cross_entropy": _cross_entropy,
    "var": _var,
    "layer_norm": _layer_norm,
}
