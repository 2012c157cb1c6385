# SPDX-License-Identifier: Apache-2.0
"""The elementwise vocabulary of epilogue programs: name, arity and meaning in plain torch.

The renderer (``coda_inductor.codegen.render``) calls the function with the op's name in
``coda_inductor.mainloop.math``. Adding an op means adding it to both, which a test compares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coda_inductor.program.dtypes import FP8, HALF, dtype_name


@dataclass(frozen=True)
class OpSpec:
    """One elementwise operation: its arity, what it computes, and whether the result is a bool."""

    arity: int
    torch: Callable[..., Any]
    boolean: bool = False


def _to_nearest(dtype: torch.dtype) -> OpSpec:
    """Round to 16-bit ``dtype`` and back, in float32: Inductor drops a cast down and up."""
    bits_dropped = 16 if dtype == torch.bfloat16 else 13  # bits of the mantissa

    def nearest(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return x.to(dtype).to(x.dtype)
        bits = x.view(torch.int32)
        even = bits + ((1 << (bits_dropped - 1)) - 1) + ((bits >> bits_dropped) & 1)
        y = (even & -(1 << bits_dropped)).view(torch.float32)
        if dtype == torch.float16:  # below 2**-14 the last place is 2**-24, as it is of 0.75
            y = torch.where(x.abs() < 2**-14, (x + 0.75) - 0.75, y)
            y = torch.where(y.abs() > 65504.0, y * torch.inf, y)
        return torch.where(x == x, y, x)

    return OpSpec(1, nearest)


#: Torch's functions of the same name, by number of arguments; then those that return bools.
_NUMBERS = {
    1: "neg abs reciprocal sqrt rsqrt exp exp2 log log2 log1p expm1 tanh sigmoid erf sin cos relu",
    2: "add sub mul div maximum minimum",
    3: "where",
}
_BOOLEANS = {1: "logical_not", 2: "lt le gt ge eq ne logical_and logical_or"}

OPS: dict[str, OpSpec] = {
    name: OpSpec(arity, getattr(torch, name), names is _BOOLEANS)
    for names in (_NUMBERS, _BOOLEANS)
    for arity, text in names.items()
    for name in text.split()
}
# To the precision of a store, and back.
OPS |= {f"round_{dtype_name(dtype)}": _to_nearest(dtype) for dtype in HALF}

#: dtypes that an epilogue's operands and stores may have. Values are always computed in float32
#: (float64 for float64 GEMMs).
OPERAND_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: dtypes that A and B may have: one of the above for both, or FP8, in which they may differ.
GEMM_DTYPES = (*OPERAND_DTYPES, *FP8)
