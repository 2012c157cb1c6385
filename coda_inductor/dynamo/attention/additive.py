# SPDX-License-Identifier: Apache-2.0
"""The condition that an additive mask of 0 and -inf was made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.dynamo.attention.constants import Constants, NotConstantError
from coda_inductor.matching import normalize, target_name, value
from coda_inductor.refusal import Refusal, refuse


def condition(mask: Node, constants: Constants) -> tuple[Node, bool] | Refusal:
    """What ``mask`` says, as a boolean tensor of the same graph, and whether that is True where it
    hides a key; or why there is none.

    A boolean mask is itself what it says. Of an additive one, ``where(c, 0, -inf)`` and
    ``zeros.masked_fill(c, -inf)`` are understood, either way round and behind a cast. With the
    dtype's lowest number in place of -inf, a row that sees nothing is the mean of all values.
    """
    known = value(mask)
    if known.dtype == torch.bool:
        return mask, False
    if known.requires_grad:
        return refuse("mask-gradient", "it wants a gradient")
    while (canon := normalize(mask)) is not None and canon.op == "cast":
        mask = canon.args[0]
    if (name := target_name(mask)) not in ("where", "masked_fill") or len(mask.args) != 3:
        return refuse("mask-bias", "it is not made of 0 and -inf by where or masked_fill")
    first, middle, last = mask.args
    seen, shown, other = (first, middle, last) if name == "where" else (middle, last, first)
    numbers = _number(shown, constants), _number(other, constants)
    if value(seen) is None or value(seen).dtype != torch.bool or set(numbers) != {0, -math.inf}:
        return refuse("mask-bias", "it adds other numbers than 0 and -inf")
    return seen, numbers[0] != 0


def _number(arg: Any, constants: Constants) -> float | None:
    """The number that ``arg`` is all over; None if it is not one, or not known."""
    if isinstance(arg, (int, float)):
        return float(arg)
    try:
        known = constants.value(arg).double().unique()
    except NotConstantError:
        return None
    return known.item() if known.numel() == 1 else None
