# SPDX-License-Identifier: Apache-2.0
"""The elementwise vocabulary of epilogue programs: name, arity and meaning in plain torch.

The renderer (``coda_inductor.codegen.render``) has one CuTeDSL template for each name here; a test
keeps the two tables equal. Adding an op means adding a row to both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coda_inductor.program.dtypes import FP8


@dataclass(frozen=True)
class OpSpec:
    """One elementwise operation: how many arguments, what it computes, whether it yields a bool."""

    arity: int
    torch: Callable[..., Any]
    boolean: bool = False


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in FP8, as torchao casts and as a store does: beyond the largest number is the largest
    number, and NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _to_nearest(dtype: torch.dtype) -> OpSpec:
    """To ``dtype`` of 16 bits and back, computed in float32: Inductor drops a cast down and up."""
    dropped = 16 if dtype == torch.bfloat16 else 13  # bits of the mantissa

    def rounded(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return x.to(dtype).to(x.dtype)
        bits = x.view(torch.int32)
        even = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
        y = (even & -(1 << dropped)).view(torch.float32)
        if dtype == torch.float16:  # below 2**-14 the last place is 2**-24, as it is of 0.75
            y = torch.where(x.abs() < 2**-14, (x + 0.75) - 0.75, y)
            y = torch.where(y.abs() > 65504.0, y * torch.inf, y)
        return torch.where(x == x, y, x)

    return OpSpec(1, rounded)


def _rounding(dtype: torch.dtype) -> OpSpec:
    return OpSpec(1, lambda x: saturated(x, dtype).to(x.dtype))


OPS: dict[str, OpSpec] = {
    # arithmetic
    "add": OpSpec(2, torch.add),
    "sub": OpSpec(2, torch.sub),
    "mul": OpSpec(2, torch.mul),
    "div": OpSpec(2, torch.div),
    "neg": OpSpec(1, torch.neg),
    "abs": OpSpec(1, torch.abs),
    "reciprocal": OpSpec(1, torch.reciprocal),
    "maximum": OpSpec(2, torch.maximum),
    "minimum": OpSpec(2, torch.minimum),
    # to the precision of a store, and back
    "round_bfloat16": _to_nearest(torch.bfloat16),
    "round_float16": _to_nearest(torch.float16),
    **{f"round_{name}": _rounding(getattr(torch, name)) for name in FP8},
    # powers and roots
    "sqrt": OpSpec(1, torch.sqrt),
    "rsqrt": OpSpec(1, torch.rsqrt),
    # transcendental
    "exp": OpSpec(1, torch.exp),
    "exp2": OpSpec(1, torch.exp2),
    "log": OpSpec(1, torch.log),
    "log2": OpSpec(1, torch.log2),
    "log1p": OpSpec(1, torch.log1p),
    "expm1": OpSpec(1, torch.expm1),
    "tanh": OpSpec(1, torch.tanh),
    "sigmoid": OpSpec(1, torch.sigmoid),
    "erf": OpSpec(1, torch.erf),
    "sin": OpSpec(1, torch.sin),
    "cos": OpSpec(1, torch.cos),
    # piecewise
    "relu": OpSpec(1, torch.relu),
    "where": OpSpec(3, torch.where),
    "lt": OpSpec(2, torch.lt, boolean=True),
    "le": OpSpec(2, torch.le, boolean=True),
    "gt": OpSpec(2, torch.gt, boolean=True),
    "ge": OpSpec(2, torch.ge, boolean=True),
    "eq": OpSpec(2, torch.eq, boolean=True),
    "ne": OpSpec(2, torch.ne, boolean=True),
    "logical_and": OpSpec(2, torch.logical_and, boolean=True),
    "logical_or": OpSpec(2, torch.logical_or, boolean=True),
    "logical_not": OpSpec(1, torch.logical_not, boolean=True),
}

#: dtypes that an epilogue's operand may have. Values are always computed in float32 (float64 for
#: float64 GEMMs).
OPERAND_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: dtypes that A and B may have: one of the above for both, or FP8, in which they may differ.
GEMM_DTYPES = (*OPERAND_DTYPES, *FP8)
#: dtypes a store may have.
STORE_DTYPES = GEMM_DTYPES
