# SPDX-License-Identifier: Apache-2.0
"""The aten ops that can run on an accumulator tile, and their steps in a program.

Each row maps an op to a function ``(emit, *args) -> value`` of its arguments, in its schema's order
and with all defaults: ``emit(op, *args)`` appends a step and returns its name; an argument is the
name of a value or a Python number. Inductor traces every graph with its decompositions, so that
activations (silu, gelu, hardtanh) and ``clamp`` are simpler ops here.
"""

from collections.abc import Callable
from typing import Any

import torch

from coda_inductor.semantic.loss import row_entropy, row_logsumexp

aten = torch.ops.aten

Value = str | float
Emit = Callable[..., Value]


def _plain(op: str) -> Callable[..., Value]:
    return lambda emit, *args: emit(op, *args)


def _add(emit: Emit, x: Value, y: Value, alpha: Value = 1) -> Value:
    return emit("add", x, y if alpha == 1 else emit("mul", y, alpha))


def _sub(emit: Emit, x: Value, y: Value, alpha: Value = 1) -> Value:
    return emit("sub", x, y if alpha == 1 else emit("mul", y, alpha))


def _pow(emit: Emit, x: Value, exponent: Value) -> Value | None:
    if exponent == 1:
        return x
    if exponent == 2:
        return emit("mul", x, x)
    if exponent == 3:
        return emit("mul", emit("mul", x, x), x)
    simple = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    return emit(simple[exponent], x) if exponent in simple else None


def _where(emit: Emit, condition: Value, x: Value, y: Value) -> Value:
    if isinstance(condition, str):
        return emit("where", condition, x, y)
    return x if condition else y


def _logical(op: str, decides: bool) -> Callable[..., Value]:
    """The lowering of a logical op. It is folded if an operand is ``decides``, the constant that
    decides the result (False for "and", True for "or")."""

    def lowering(emit: Emit, x: Value, y: Value) -> Value:
        for value, other in ((x, y), (y, x)):
            if not isinstance(value, str):
                return float(decides) if bool(value) == decides else other
        return emit(op, x, y)

    return lowering


_SAME_NAME = (
    "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "log", "log2", "log1p", "expm1",
    "tanh", "sigmoid", "erf", "sin", "cos", "relu", "logical_not", "maximum", "minimum",
)  # fmt: skip
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")

_ARITHMETIC = {
    aten.add: _add, aten.sub: _sub, aten.mul: _plain("mul"), aten.div: _plain("div"),
}  # fmt: skip

LOWERINGS: dict[Any, Callable[..., Value | None]] = {
    **{packet.Tensor: lowering for packet, lowering in _ARITHMETIC.items()},
    **{packet.Scalar: lowering for packet, lowering in _ARITHMETIC.items()},
    aten.clamp_min.default: _plain("maximum"),
    aten.clamp_max.default: _plain("minimum"),
    aten.pow.Tensor_Scalar: _pow,
    aten.where.self: _where,
    aten.logical_and.default: _logical("logical_and", decides=False),
    aten.logical_or.default: _logical("logical_or", decides=True),
    **{getattr(aten, name).default: _plain(name) for name in _SAME_NAME},
    # Not eq and ne: a tile's value is not rounded, so x == amax(x), for example, would never hold.
    **{getattr(aten, name).Tensor: _plain(name) for name in _COMPARE[:4]},
    **{getattr(aten, name).Scalar: _plain(name) for name in _COMPARE},
}

#: Ops whose arguments are truth values.
LOGICAL = (aten.logical_and.default, aten.logical_or.default, aten.logical_not.default)

#: Row reductions that can leave the tile as partials: op -> how partials combine.
REDUCTIONS: dict[Any, str] = {
    aten.sum.dim_IntList: "add",
    aten.mean.dim: "add",
    aten.amax.default: "max",
    row_logsumexp: "logsumexp",
    row_entropy: "entropy",
}
