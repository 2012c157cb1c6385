# SPDX-License-Identifier: Apache-2.0
"""The condition that an additive mask of 0 and -inf was made of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from coda_inductor.compat import unset_fake_temporarily
from coda_inductor.dynamo.attention.constants import Constants, NotConstantError
from coda_inductor.graph.nodes import arguments
from coda_inductor.graph.read import read
from coda_inductor.graph.walk import base, chain
from coda_inductor.matching import is_cast, target_name, value
from coda_inductor.refusal import Refusal, refuse

#: Ops of which no argument but the filling number says what the elements are.
_FILLED = {
    "ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0,
    "full": None, "full_like": None, "new_full": None,
}  # fmt: skip


class Condition(NamedTuple):
    """``seen``, a boolean tensor, is True where a key is hidden if ``hides``, and where it is shown
    otherwise; ``steps`` are all nodes from the mask to it, of which none may have been written to
    after it was made."""

    seen: Node
    hides: bool
    steps: frozenset[Node]


def condition(mask: Node, constants: Constants) -> Condition | Refusal:
    """What ``mask`` says, as a boolean tensor of the same graph; or why there is none.

    A boolean mask is itself what it says. Of an additive one, ``where(c, 0, -inf)`` and
    ``zeros.masked_fill(c, -inf)`` are understood, either way round and behind a cast. With the
    dtype's lowest number in place of -inf, a row that sees nothing is the mean of all values.
    """
    known, steps = value(mask), {mask}
    if known.dtype == torch.bool:
        return Condition(mask, False, frozenset(steps))
    if known.requires_grad:
        return refuse("mask-gradient", "it wants a gradient")
    steps.update(chain(mask, is_cast))
    given = read(base(mask, is_cast))
    if given is None or given.op not in ("where", "masked_fill"):
        return refuse("mask-bias", "it is not made of 0 and -inf by where or masked_fill")
    if given.op == "where":
        seen, shown, other = given["condition"], given["input"], given["other"]
    else:
        seen, shown, other = given["mask"], given["value"], given["input"]
    numbers = _number(shown, constants), _number(other, constants)
    if value(seen) is None or value(seen).dtype != torch.bool or set(numbers) != {0, -math.inf}:
        return refuse("mask-bias", "it adds other numbers than 0 and -inf")
    return Condition(seen, numbers[0] != 0, frozenset({*steps, seen}))


def _number(arg: Any, constants: Constants) -> float | None:
    """The number that ``arg`` is all over; None if it is not one, or not known."""
    if isinstance(arg, (int, float)):
        return float(arg)
    try:
        if (
            arg.op.startswith("call_")
            and target_name(arg) in _FILLED
            and arg not in constants.changed
        ):
            return _fill(arg)  # of any size
        known = constants.value(arg)
    except NotConstantError:
        return None
    if not known.numel():
        return None
    low, high = known.aminmax()
    return float(low) if low == high else None


def _fill(node: Node) -> float | None:
    """What a call of one of ``_FILLED`` fills its tensor with, as its dtype holds it; None if that
    is not known."""
    number = _FILLED[target_name(node)]
    if number is None:
        number = arguments(node)["fill_value"]
    if not isinstance(number, (bool, int, float)):
        return None
    with unset_fake_temporarily():
        try:
            return float(torch.full((), number, dtype=value(node).dtype, device="cpu").item())
        except (RuntimeError, OverflowError):
            return None
