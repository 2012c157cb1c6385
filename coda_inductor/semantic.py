"""The semantic vocabulary: what many spellings of an idiom are raised to.

Each op is defined once, by a plain torch function. The op is what passes match on; what stays
unfused is traced through that function again, so that Inductor sees plain aten.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LIB = torch.library.Library("coda_inductor", "FRAGMENT")

#: Semantic op -> the torch function that defines it.
DEFINITIONS: dict[torch._ops.OpOverload, Callable[..., object]] = {}


def _define(schema: str, function: Callable[..., object]) -> torch._ops.OpOverload:
    name = schema.split("(", maxsplit=1)[0]
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"coda_inductor::{name}", function, lib=LIB)
    op = getattr(torch.ops.coda_inductor, name).default
    DEFINITIONS[op] = function
    return op


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that statistics are computed in: float32 for half types."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm_definition(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension.

    ``y = x * rstd * weight`` with ``rstd = rsqrt(mean(x**2, -1) + eps)``, all in float32 (float64
    for float64 inputs), then cast to ``out_dtype``. Returns y, shaped like x, and rstd (..., 1).
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467), eq. 4.
    """
    wide = x.to(_wide(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(out_dtype), rstd


def swiglu_definition(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` elementwise, in the promoted dtype of its inputs.

    Written as users write it, so that what stays unfused is exactly what Inductor would have seen.
    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), section 2.
    """
    return F.silu(gate) * up


rms_norm = _define(
    "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType out_dtype) -> (Tensor, Tensor)",
    rms_norm_definition,
)
swiglu = _define("swiglu(Tensor gate, Tensor up) -> Tensor", swiglu_definition)
