# SPDX-License-Identifier: Apache-2.0
"""Grow a GEMM's epilogue: which neighbours run on its accumulator tile, as which program.

Before::

    mm = aten.mm(y, Wt); v = view(mm, [B, T, d]); x = x0 + v; h = x * gamma; s = (x * x).sum(-1)

After (a :class:`Region`; nothing is changed in the graph)::

    absorbed = {v, x, h, x * x, s}; program: c0 tile, w0 row; store x, h; reduce x * x over N

Why it is valid: a region is convex (no path leaves it and comes back) and lies on one side of the
joint graph, every absorbed op is elementwise on the tile or reduces along N or M, and every value
that others read is stored.

A node stays outside, with a reason, when its op is not in the vocabulary, an operand broadcasts
over part of M, or the limits on tile operands and stores are reached.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from coda_inductor.fuse.grower import Banned, Grower
from coda_inductor.fuse.region import Region
from coda_inductor.fuse.stores import unstorable
from coda_inductor.graph.sides import Scope
from coda_inductor.refusal import Refused

__all__ = ["Banned", "grow"]


def grow(
    anchors: tuple[Node, ...],
    scope: Scope,
    banned: Banned | None = None,
    total: Node | None = None,
    lanes: dict[Node, int] | None = None,
) -> Region:
    """The largest legal region around ``anchors``, or around their sum ``total``; ``lanes`` as in
    :class:`Region`. All anchors must be on the same side.

    Raises:
        Refused: an anchor's own result would have to be stored, but cannot be.
    """
    banned = dict(banned or {})
    known = set(banned)
    while True:
        region = _grown(lambda: Region(anchors, total, lanes=lanes or {}), scope, banned)
        trouble = unstorable(region)
        if trouble is None:
            region.refusals.update({n: why for n, why in banned.items() if n not in known})
            return region
        node, reason = trouble
        if node in banned or node in (*anchors, total, *region.lanes):
            raise Refused(reason.within(f"{node.name}: {{}}"))
        banned[node] = reason


def _grown(start: Callable[[], Region], scope: Scope, banned: Banned) -> Region:
    """A region that loads as few tiles as possible: a tile that the backward pass recomputes is not
    loaded if the region can compute it from tiles that it loads later."""
    first = Grower(start(), scope, banned)
    region, tiles = first.run(), first.tiles()
    made = {tile for tile in tiles if scope.recomputed(tile)}
    if not made:
        return region
    second = Grower(start(), scope, banned, tiles - made)
    again = second.run()
    return again if len(second.tiles()) < len(tiles) else region
