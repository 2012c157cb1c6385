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

from torch.fx import Node

from coda_inductor.fuse.grower import Bans, Grower
from coda_inductor.fuse.region import Region
from coda_inductor.fuse.stores import unstorable
from coda_inductor.graph.nodes import label
from coda_inductor.graph.sides import Scope
from coda_inductor.refusal import Refused

__all__ = ["Bans", "grow"]


def grow(
    anchors: tuple[Node, ...],
    scope: Scope,
    bans: Bans | None = None,
    total: Node | None = None,
    lanes: dict[Node, int] | None = None,
) -> Region:
    """The largest legal region around ``anchors``, or around their sum ``total``; ``lanes`` as in
    :class:`Region`. All anchors must be on the same side.

    Raises: Refused: an anchor's own result would have to be stored, but cannot be.
    """
    bans = dict(bans or {})
    initial = set(bans)
    region = Region(anchors, total, lanes=lanes or {}, eager=scope.eager)
    first = Grower(region, scope, bans)
    while True:
        first.run(early=True)
        grower = _fewer_tiles(first)
        troubles = unstorable(grower.region)
        if not troubles:
            region = grower.finish()
            region.refusals.update({n: why for n, why in bans.items() if n not in initial})
            return region
        if not first.ban(troubles):
            node, reason = next(iter(troubles.items()))
            raise Refused(reason.within(f"{label(node)}: {{}}"))


def _fewer_tiles(first: Grower) -> Grower:
    """``first``, or a region with fewer loads that computes what the backward pass recomputes."""
    region, scope, tiles = first.region, first.scope, first.tiles()
    recomputed = {tile for tile in tiles if scope.recomputed(tile)}
    if not recomputed:
        return first
    retry = Region(region.anchors, region.total, lanes=region.lanes, eager=region.eager)
    second = Grower(retry, scope, first.bans, tiles - recomputed)
    second.run(early=False)
    return second if len(second.tiles()) < len(tiles) else first
