# SPDX-License-Identifier: Apache-2.0
"""What a program may do across the columns of one attention head: rotate, and sum.

The N columns of a projection to queries or keys are heads of ``program.head`` columns each, one
beside the other. A rotary embedding combines two columns of a head, and a norm of each head needs
their squares' sum. Neither crosses the border of a head, so that a tile of whole heads has all of
it::

    y = x * cos + swap(x) * sin         cos, sin: tables (M, head), read under every head

``swap(x, width, distance)`` is a permutation and nothing else: of the first ``width`` columns of
each head those ``distance`` apart change places, in blocks of twice the distance; the others stay.
Halves of a head (rotate_half) have the distance width / 2, neighbouring pairs 1. The sign of
rotate_half is in the table; both tables hold 1/2 where nothing is rotated. Being a permutation of
columns, it goes through every elementwise step: swap(f(x, row)) = f(swap(x), swap(row)), and a
value of one row (a column vector) is its own.

``head_sum(x)`` is the sum over the columns of each head, under all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, cat


@dataclass(frozen=True)
class HeadOp:
    """How many numbers follow the value, and what is computed of (..., N) and ``head``."""

    numbers: int
    torch: Callable[..., Tensor]


def swap(x: Tensor, head: int, width: int, distance: int) -> Tensor:
    """(..., N) with columns exchanged, see the module docstring; N is a multiple of ``head``."""
    heads = x.unflatten(-1, (-1, head))
    turned = heads[..., :width].unflatten(-1, (-1, 2, distance)).flip(-2).flatten(-3)
    return cat((turned, heads[..., width:]), -1).flatten(-2)


def head_sum(x: Tensor, head: int) -> Tensor:
    """(..., N): the sum over each ``head`` columns, as often as there are columns."""
    heads = x.unflatten(-1, (-1, head))
    return heads.sum(-1, keepdim=True).expand_as(heads).flatten(-2)


HEAD_OPS = {"swap": HeadOp(2, swap), "head_sum": HeadOp(0, head_sum)}
