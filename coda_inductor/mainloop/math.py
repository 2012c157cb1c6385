# SPDX-License-Identifier: Apache-2.0
"""Device-side elementwise functions that generated epilogues call.

Each takes Float32 scalars (Hopper, consumer Blackwell) or packed pairs of them, QuACK's ``F2``
(data center Blackwell), or a mix with Python numbers; comparisons give Booleans. Fast
approximations are used if their relative error is near 1e-7; the hardware's tanh has 1e-3.
"""

import functools
import operator
import sys

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, select_
from cutlass._mlir.dialects import arith
from quack import activation
from quack.epilogue.math import F2

from coda_inductor.mainloop import approximations


def _lanewise(scalar_function):

    @functools.wraps(scalar_function)
    def apply(*args):
        if not any(isinstance(a, tuple) for a in args):
            return scalar_function(*args)
        low, high = ([a[i] if isinstance(a, tuple) else a for a in args] for i in (0, 1))
        return F2(scalar_function(*low), scalar_function(*high))

    return apply


def _float_op(function, **kwargs):
    """``function`` of Float32 scalars, lifted to packed pairs."""
    return _lanewise(lambda *args: function(*map(Float32, args), **kwargs))


div = _float_op(cute.math.div, full=True)
absolute = _float_op(cute.math.abs)
reciprocal = _float_op(cute.math.rcp, approx=True)
#: A subnormal counts as zero: keeping it costs four more instructions.
reciprocal_of_normal = _float_op(cute.math.rcp, approx=True, ftz=True)
sqrt = _float_op(cute.math.sqrt, approx=True)
rsqrt = _float_op(cute.math.rsqrt, approx=True)
exp = _float_op(cute.math.exp, fastmath=True)
exp2 = _float_op(cute.math.exp2, fastmath=True)
log = _float_op(cute.math.log, fastmath=True)
log2 = _float_op(cute.math.log2, fastmath=True)
sigmoid = _float_op(activation.sigmoid)
# Full range reduction: angles of positions are large.
sin, cos = _float_op(cute.math.sin), _float_op(cute.math.cos)
log1p, expm1, tanh, erf = (
    _float_op(getattr(approximations, name), f=sys.modules[__name__])
    for name in ("log1p", "expm1", "tanh", "erf")
)
# NaN if either is NaN, like torch.
maximum, minimum = (
    _float_op(lambda x, y, op=op: Float32(op(x.ir_value(), y.ir_value())))
    for op in (arith.maximumf, arith.minimumf)
)
# To the nearest, ties to even, as a store does.
round_bfloat16, round_float16 = (
    _float_op(lambda x, to=to: Float32(x.to(to))) for to in (BFloat16, Float16)
)
lt, le, gt, ge, eq, ne = (
    _float_op(lambda x, y, op=op: Boolean(op(x, y)))
    for op in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
)
logical_and, logical_or = (
    _lanewise(lambda x, y, op=op: Boolean(op(x, y))) for op in (operator.and_, operator.or_)
)
logical_not = _lanewise(lambda x: Boolean(x ^ Boolean(True)))
where = _lanewise(lambda condition, x, y: Float32(select_(condition, Float32(x), Float32(y))))


def relu(x):
    return maximum(x, 0.0)
