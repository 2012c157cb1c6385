# SPDX-License-Identifier: Apache-2.0
"""Factories of a Dynamo graph that fill a tensor with one number."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from coda_inductor.compat import unset_fake_temporarily
from coda_inductor.matching import value

#: Ops of which no argument but the filling number says what the elements are.
FILLED = {
    "ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0,
    "full": None, "full_like": None, "new_full": None,
}  # fmt: skip


def op_name(node: Node) -> str:
    """The op of ``node``; with its module if it is neither torch's nor Python's."""
    if node.op != "call_function":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    if node.target not in (getattr(operator, name, None), getattr(torch, name, None)):
        return f"{getattr(node.target, '__module__', '')}.{name}"  # only named like ours
    return name


def fill(node: Node) -> float | None:
    """What a call of one of ``FILLED`` fills its tensor with, as its dtype holds it; None if that
    is not known."""
    number = FILLED[op_name(node)]
    if number is None:
        number = node.args[-1] if "fill_value" not in node.kwargs else node.kwargs["fill_value"]
    if not isinstance(number, (bool, int, float)):
        return None
    with unset_fake_temporarily():
        try:
            return float(torch.full((), number, dtype=value(node).dtype, device="cpu").item())
        except (RuntimeError, OverflowError):
            return None
