# SPDX-License-Identifier: Apache-2.0
"""How a semantic op is defined: once, by a plain torch function."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coda_inductor.compat import OpOverload

LIB = torch.library.Library("coda_inductor", "FRAGMENT")


#: Semantic op -> the torch function that defines it.
DEFINITIONS: dict[OpOverload, Callable[..., object]] = {}


#: Semantic op -> what counters call it, where that is not the op's own name.
NAMES: dict[OpOverload, str] = {}


def define(schema: str, function: Callable[..., object], *, pointwise: bool = False) -> OpOverload:
    """Register the op ``coda_inductor::<schema>`` that ``function`` defines; returns it."""
    name = schema.split("(", maxsplit=1)[0]
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.pointwise,) if pointwise else ()))
    LIB.define(schema, tags=tags)
    LIB.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"coda_inductor::{name}", function, lib=LIB)
    op = getattr(torch.ops.coda_inductor, name).default
    DEFINITIONS[op] = function
    return op


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that statistics are computed in: float32 for half types."""
    return torch.promote_types(dtype, torch.float32)
