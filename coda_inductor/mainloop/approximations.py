# SPDX-License-Identifier: Apache-2.0
"""Functions of float32 without a branch, from the hardware's ``exp2``, ``log2`` and reciprocal.

CUDA's own ``erf``, ``log1p`` and ``expm1`` branch and need many registers: in an epilogue they cost
80 to 100 multiplications per element and make the kernel spill (gotchas.md). Each function here
takes a number ``x`` and the primitives ``f`` to compute with (``f.exp2``, ``f.where``, ...), so
that it can be tested without a GPU.

The coefficients are weighted least squares fits, made minimax by Lawson's iteration, in float64;
their relative error on each function's interval is below 4e-8, before float32 rounds.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)

#: erf(x) / x, a polynomial in x**2, |x| <= 1; the highest power first, here and below.
_ERF_SMALL = (
    *(-0.0005660153110511601, 0.004924789071083069, -0.02671770751476288),
    *(0.112804114818573, -0.3761235475540161, 1.1283791065216064),
)
#: -log2(1 - erf(t)) / t, a polynomial in t, 1 <= t <= 4; beyond, 1 - erf(t) is negligible.
_ERF_LARGE = (
    *(-0.0003046054916922003, 0.0046038273721933365, -0.03291120380163193),
    *(0.1516827940940857, 0.9172855019569397, 1.6280603408813477),
)
#: log1p(y) / s where s = y / (2 + y), a polynomial in s**2, |y| <= 1/2: log1p(y) = 2 atanh(s).
_LOG1P = (
    *(0.2819153666496277, 0.27957668900489807, 0.4002511501312256),
    *(0.6666631102561951, 2.0),
)
#: expm1(x) / x, a polynomial in x, |x| <= 1/2.
_EXPM1 = (
    *(0.00019996819901280105, 0.0013997782953083515, 0.008333052508533001),
    *(0.04166530445218086, 0.1666666865348816, 0.5000000596046448, 1.0),
)


def erf(x: Any, f: Any) -> Any:
    """The error function, which is NaN for NaN and +-1 for +-inf."""
    size = f.absolute(x)
    t = f.where(f.lt(size, 4.0), size, 4.0)
    tail = 1.0 - f.exp2(-(t * _polynomial(_ERF_LARGE, t)))
    tail = f.where(f.lt(x, 0.0), -tail, tail)
    return f.where(f.lt(1.0, size), tail, x * _polynomial(_ERF_SMALL, x * x))


def log1p(x: Any, f: Any) -> Any:
    """log(1 + x), accurate for small x; NaN below -1."""
    s = x * f.reciprocal_of_normal(x + 2.0)
    near = s * _polynomial(_LOG1P, s * s)
    return f.where(f.lt(f.absolute(x), 0.5), near, f.log2(x + 1.0) * _LN_2)


def expm1(x: Any, f: Any) -> Any:
    """exp(x) - 1, accurate for small x."""
    near = x * _polynomial(_EXPM1, x)
    return f.where(f.lt(f.absolute(x), 0.5), near, f.exp2(x * _LOG2_E) - 1.0)


def tanh(x: Any, f: Any) -> Any:
    """The hyperbolic tangent 1 - 2 / (1 + exp(2 x)): error 1e-7, saturates without overflow."""
    return 1.0 - 2.0 * f.reciprocal_of_normal(f.exp2(x * (2.0 * _LOG2_E)) + 1.0)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    return functools.reduce(lambda value, c: value * x + c, coefficients[1:], coefficients[0])
