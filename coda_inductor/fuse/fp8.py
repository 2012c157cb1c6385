# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 on the tile, where the scale is known beforehand: a step that rounds, and a store.

A store saturates, and torch's cast makes NaN or infinity of what is too large. So a cast is taken
only behind the clamp that every recipe has in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from coda_inductor.compat import to_copy
from coda_inductor.graph.nodes import fake, prims
from coda_inductor.graph.vocabulary import Emit, Value
from coda_inductor.program import Step
from coda_inductor.program.dtypes import FP8, dtype_name
from coda_inductor.refusal import Refusal, refuse

_CASTS = (prims.convert_element_type.default, to_copy)


def casts(node: Node) -> bool:
    """Is ``node`` a cast to FP8?"""
    dtype = getattr(fake(node), "dtype", None)
    return node.target in _CASTS and dtype is not None and dtype_name(dtype) in FP8


def rounded(node: Node, value: Value, steps: Sequence[Step], emit: Emit) -> Value | Refusal:
    """The cast ``node`` of ``value`` on the tile, or why it cannot be made there: ``steps`` do not
    clamp it to what the dtype can hold."""
    dtype, made = fake(node).dtype, {step.name: step for step in steps}
    largest, bounds = torch.finfo(dtype).max, set()
    step = made.get(str(value))
    while step is not None and step.op in ("maximum", "minimum"):
        numbers = [x for x in step.args if not isinstance(x, str)]
        if not numbers or abs(numbers[0]) > largest:
            break
        bounds.add(step.op)
        step = next((made[x] for x in step.args if isinstance(x, str) and x in made), None)
    if len(bounds) == 2:
        return emit(f"round_{dtype_name(dtype)}", value)
    text = f"{node.target} casts to {dtype} what is not clamped to its range"
    return refuse("fp8-overflow", text)
