# SPDX-License-Identifier: Apache-2.0
"""Rotations, the only work of a program that crosses the columns of one attention head.

The N columns of a projection to queries or keys are consecutive heads of ``program.head`` columns
each. A rotary embedding combines two columns of one head, so a tile of whole heads has both::

    y = x * cos + swap(x) * sin         cos, sin: tables (M, head), read under every head

``swap(x, width, distance)`` is a permutation: among the first ``width`` columns of each head,
columns at ``distance`` from each other are exchanged; the others stay. Halves of a head
(rotate_half) have the distance width / 2, neighboring pairs 1. The sign of rotate_half is in the
table; both tables are 1/2 where nothing is rotated. A permutation of columns commutes with every
elementwise step: swap(f(x, row)) = f(swap(x), swap(row)), and a column vector does not change.
"""

from torch import Tensor, cat


def swap(x: Tensor, head: int, width: int, distance: int) -> Tensor:
    """``x`` (..., N) with exchanged columns, see the module docstring. ``head`` divides N."""
    heads = x.unflatten(-1, (-1, head))
    swapped = heads[..., :width].unflatten(-1, (-1, 2, distance)).flip(-2).flatten(-3)
    return cat((swapped, heads[..., width:]), -1).flatten(-2)
