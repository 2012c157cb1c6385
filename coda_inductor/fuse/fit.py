# SPDX-License-Identifier: Apache-2.0
"""A region that needs more shared memory than any kernel has gives up its heaviest tile.

Before (a norm's gradient on a float32 residual stream; FP8, products added up step by step)::

    acc; add t0, t1 (bfloat16); mul x (float32); store dn; sums of dn * gamma * x and dn * x

After (the sums, which read x, are Inductor's)::

    acc; add t0, t1; store dn

The region loses all nodes that are computed from the heaviest loaded tile, or, if it loads none,
from the last stored one. Earlier nodes stay: a residual's sum is fused although the norm after it
is not. This repeats until the rest fits or nothing is left.
"""

from __future__ import annotations

from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.refusal import refuse

TOO_HEAVY = refuse("shared-memory", "with it, the epilogue needs more shared memory than there is")


def heaviest(region: Region) -> list[Node]:
    """The absorbed nodes to remove from ``region``; empty if none can be removed."""
    tiles = [operand for operand in region.operands.values() if operand.kind == "tile"]
    tiles.reverse()  # of equal ones, take the one that was read last
    for tile in sorted(tiles, key=lambda t: -WIDTHS[t.dtype]):
        if nodes := _dependents({tile.name}, region):
            return nodes
    stored = [str(value) for value in region.stored()]
    return next((nodes for v in reversed(stored) if (nodes := _dependents({v}, region))), [])


def _dependents(values: set[str], region: Region) -> list[Node]:
    """The absorbed nodes that are ``values`` or depend on them."""
    reached = set(values)
    for step in region.steps:
        if reached.intersection(step.args):
            reached.add(step.name)
    return [n for n in region.work if n not in region.reduces and region.values[n] in reached]
