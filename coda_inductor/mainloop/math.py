# SPDX-License-Identifier: Apache-2.0
"""Device-side elementwise functions that generated epilogues call.

Each takes Float32 scalars (Hopper, consumer Blackwell) or packed pairs of them, QuACK's ``F2``
(data-centre Blackwell), or a mix with Python numbers; comparisons give Booleans. Addition,
subtraction, multiplication and negation need no function: the operators do the same.

Fast approximations are used where they are good to float32 (relative error near 1e-7). The
hardware's tanh is not (1e-3 relative), so it is not used.
"""

from __future__ import annotations

import functools
import sys

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, select_
from cutlass._mlir.dialects import arith, llvm
from quack import activation
from quack.epilogue.math import F2

from coda_inductor.mainloop import approximations

#: What approximations are made of: the functions of this file.
_SELF = sys.modules[__name__]


def _lanewise(scalar_function):
    """Lift a function of scalars to packed pairs."""

    @functools.wraps(scalar_function)
    def apply(*args):
        if not any(isinstance(a, tuple) for a in args):
            return scalar_function(*args)
        low, high = ([a[i] if isinstance(a, tuple) else a for a in args] for i in (0, 1))
        return F2(scalar_function(*low), scalar_function(*high))

    return apply


@_lanewise
def div(x, y):
    return cute.math.div(Float32(x), Float32(y), full=True)


@_lanewise
def absolute(x):
    return cute.math.abs(Float32(x))


@_lanewise
def reciprocal(x):
    return cute.math.rcp(Float32(x), approx=True)


@_lanewise
def reciprocal_of_normal(x):
    """A subnormal counts as zero: to keep it takes four instructions more."""
    return cute.math.rcp(Float32(x), approx=True, ftz=True)


@_lanewise
def maximum(x, y):
    """NaN if either is NaN, like torch."""
    return Float32(arith.maximumf(Float32(x).ir_value(), Float32(y).ir_value()))


@_lanewise
def minimum(x, y):
    """NaN if either is NaN, like torch."""
    return Float32(arith.minimumf(Float32(x).ir_value(), Float32(y).ir_value()))


def relu(x):
    return maximum(x, 0.0)


@_lanewise
def round_bfloat16(x):
    """To the nearest bfloat16, ties to even, as a store does."""
    return Float32(Float32(x).to(BFloat16))


@_lanewise
def round_float16(x):
    return Float32(Float32(x).to(Float16))


def _round_float8(kind: str):
    """To the nearest number of 8 bits and back, as a store does: beyond the largest number is the
    largest number, NaN stays NaN (PTX: satfinite)."""
    text = (
        "{.reg .b16 h, l; .reg .b32 p; .reg .f32 z; mov.f32 z, 0f00000000;"
        f" cvt.rn.satfinite.{kind}x2.f32 h, z, $1; cvt.rn.f16x2.{kind}x2 p, h;"
        " mov.b32 {l, h}, p; cvt.f32.f16 $0, l;}"
    )

    @_lanewise
    def rounded(x):
        value = Float32(x).ir_value()
        # It has no effects: equal ones may be merged, unused ones dropped.
        return Float32(llvm.inline_asm(value.type, [value], text, "=f,f", has_side_effects=False))

    return rounded


round_float8_e4m3fn = _round_float8("e4m3")
round_float8_e5m2 = _round_float8("e5m2")


@_lanewise
def sqrt(x):
    return cute.math.sqrt(Float32(x), approx=True)


@_lanewise
def rsqrt(x):
    return cute.math.rsqrt(Float32(x), approx=True)


@_lanewise
def exp(x):
    return cute.math.exp(Float32(x), fastmath=True)


@_lanewise
def exp2(x):
    return cute.math.exp2(Float32(x), fastmath=True)


@_lanewise
def log(x):
    return cute.math.log(Float32(x), fastmath=True)


@_lanewise
def log2(x):
    return cute.math.log2(Float32(x), fastmath=True)


@_lanewise
def log1p(x):
    return approximations.log1p(Float32(x), _SELF)


@_lanewise
def expm1(x):
    return approximations.expm1(Float32(x), _SELF)


@_lanewise
def tanh(x):
    return approximations.tanh(Float32(x), _SELF)


@_lanewise
def sigmoid(x):
    return activation.sigmoid(Float32(x))


@_lanewise
def erf(x):
    return approximations.erf(Float32(x), _SELF)


@_lanewise
def sin(x):
    """Full range reduction: rotary angles are large."""
    return cute.math.sin(Float32(x))


@_lanewise
def cos(x):
    """Full range reduction: rotary angles are large."""
    return cute.math.cos(Float32(x))


@_lanewise
def where(condition, x, y):
    return Float32(select_(condition, Float32(x), Float32(y)))


@_lanewise
def lt(x, y):
    return Boolean(Float32(x) < Float32(y))


@_lanewise
def le(x, y):
    return Boolean(Float32(x) <= Float32(y))


@_lanewise
def gt(x, y):
    return Boolean(Float32(x) > Float32(y))


@_lanewise
def ge(x, y):
    return Boolean(Float32(x) >= Float32(y))


@_lanewise
def eq(x, y):
    return Boolean(Float32(x) == Float32(y))


@_lanewise
def ne(x, y):
    return Boolean(Float32(x) != Float32(y))


@_lanewise
def logical_and(x, y):
    return Boolean(x & y)


@_lanewise
def logical_or(x, y):
    return Boolean(x | y)


@_lanewise
def logical_not(x):
    return Boolean(x ^ Boolean(True))
