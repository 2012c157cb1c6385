# SPDX-License-Identifier: Apache-2.0
"""Torch's elementwise functions as sympy expressions of one element.

Numbers are exact: 0.1 is 1/10, and the few irrational constants in activations are recognized. The
formulas are the real functions; where torch switches formulas for floating point (softplus beyond
its threshold), the exact one is used.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import sympy

_CONSTANTS = (
    sympy.sqrt(2 / sympy.pi), sympy.sqrt(2), sympy.sqrt(sympy.Rational(1, 2)), sympy.pi, sympy.E,
    sympy.sqrt(sympy.pi), 2 / sympy.sqrt(sympy.pi), sympy.log(2), 1 / sympy.log(2),
    sympy.sqrt(1 / (2 * sympy.pi)), sympy.sqrt(2 * sympy.pi), 1 / sympy.pi, 1 / sympy.E,
)  # fmt: skip
_SLOPE = sympy.Rational(1, 100)  # torch's default
_IRRATIONAL = {sign * float(c): sign * c for c in _CONSTANTS for sign in (1, -1)}


def number(x: Any) -> Any:
    """An exact sympy number for a Python number; other objects are returned unchanged."""
    if isinstance(x, bool) or not isinstance(x, (int, float, sympy.Float)):
        return x
    if isinstance(x, int):
        return sympy.Integer(x)
    if not math.isfinite(x):
        return sympy.sympify(float(x))
    near = next((c for f, c in _IRRATIONAL.items() if math.isclose(f, x, rel_tol=1e-15)), None)
    return sympy.Rational(str(x)) if near is None else near


def _piecewise(condition: Any, yes: Any, no: Any) -> sympy.Expr:
    return sympy.Piecewise((yes, condition), (no, True))


def _maximum(x: Any, y: Any) -> sympy.Expr:
    return _piecewise(_greater(x, y), x, y)


def _greater(x: Any, y: Any) -> Any:
    """``x > y``. A root x and a number y are compared by their squares."""
    root = isinstance(x, sympy.Pow) and x.exp == sympy.Rational(1, 2)
    return x.base > y**2 if root and y.is_nonnegative else x > y


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else _maximum(x, low)
    return x if high is None else _piecewise(x > high, high, x)


def _sigmoid(x: Any) -> sympy.Expr:
    return 1 / (1 + sympy.exp(-x))


def _softplus(x: Any, beta: Any = 1, _threshold: Any = 20) -> sympy.Expr:
    return sympy.log(1 + sympy.exp(beta * x)) / beta


def _gelu(x: Any, approximate: str = "none") -> sympy.Expr:
    """GELU: Hendrycks and Gimpel, arXiv 1606.08415, section 2."""
    if approximate == "tanh":
        cubic = x + sympy.Rational("0.044715") * x**3
        return x / 2 * (1 + sympy.tanh(sympy.sqrt(2 / sympy.pi) * cubic))
    return x / 2 * (1 + sympy.erf(x / sympy.sqrt(2)))


def _hardsigmoid(x: Any) -> sympy.Expr:
    return _clamp(x + 3, sympy.Integer(0), sympy.Integer(6)) / 6


def _silu_backward(dy: Any, x: Any) -> sympy.Expr:
    """The derivative of x sigmoid(x), by the product rule."""
    s = _sigmoid(x)
    return dy * s * (1 + x * (1 - s))


#: Name of aten -> its meaning on expressions. This is the vocabulary of meanings and idioms.
FORMULAS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "neg": operator.neg, "pow": operator.pow, "square": lambda x: x**2,
    "reciprocal": lambda x: 1 / x, "rsqrt": lambda x: 1 / sympy.sqrt(x), "sqrt": sympy.sqrt,
    "exp": sympy.exp, "exp2": lambda x: 2**x, "expm1": lambda x: sympy.exp(x) - 1,
    "log": sympy.log, "log2": lambda x: sympy.log(x) / sympy.log(2),
    "log1p": lambda x: sympy.log(1 + x),
    "sin": sympy.sin, "cos": sympy.cos, "tanh": sympy.tanh, "erf": sympy.erf,
    "sigmoid": _sigmoid, "log_sigmoid": lambda x: -_softplus(-x), "silu": lambda x: x * _sigmoid(x),
    "silu_backward": _silu_backward, "softplus": _softplus, "gelu": _gelu,
    "mish": lambda x: x * sympy.tanh(_softplus(x)),
    "abs": lambda x: _piecewise(x > 0, x, -x), "relu": lambda x: _maximum(x, sympy.Integer(0)),
    "relu6": lambda x: _clamp(x, sympy.Integer(0), sympy.Integer(6)),
    "leaky_relu": lambda x, slope=_SLOPE: _piecewise(x > 0, x, slope * x),
    "elu": lambda x, alpha=1: _piecewise(x > 0, x, alpha * (sympy.exp(x) - 1)),
    "hardtanh": lambda x, low=-1, high=1: _clamp(x, low, high),
    "hardsigmoid": _hardsigmoid, "hardswish": lambda x: x * _hardsigmoid(x),
    "maximum": _maximum, "minimum": lambda x, y: _piecewise(x > y, y, x),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": lambda x, high: _clamp(x, None, high),
    "where": _piecewise, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge,
}  # fmt: skip
