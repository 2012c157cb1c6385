# SPDX-License-Identifier: Apache-2.0
"""Grow a GEMM's epilogue: choose the neighbors that run on its accumulator tile, as a program.

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

import heapq
from collections.abc import Set as AbstractSet

import torch
from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.fuse.stores import MAX_STORES, unstorable
from coda_inductor.fuse.tile import Bans, Tile
from coda_inductor.graph.gemms import GEMMS, routes_of
from coda_inductor.graph.nodes import fake, is_transpose, label, renames, renames_or_casts
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.vocabulary import REDUCTIONS
from coda_inductor.graph.walk import closure, readers, unroll
from coda_inductor.program.ir import ROUTES
from coda_inductor.refusal import Refusal, Refused, refuse
from coda_inductor.semantic.experts import WGRAD
from coda_inductor.semantic.fp8_casts import CAST


def grow(
    anchors: tuple[Node, ...],
    scope: Scope,
    bans: Bans | None = None,
    total: Node | None = None,
    lanes: dict[Node, int] | None = None,
) -> Region:
    """The largest legal region around ``anchors``, or around their sum ``total``; ``lanes`` as in
    :class:`Region`. All anchors must be on the same side.

    Raises:
        Refused: an anchor's own result would have to be stored, but cannot be.
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


def on_tile(x: Node, anchor: Node, scope: Scope) -> bool:
    """Can the epilogue of ``anchor`` compute ``x``? Nodes behind ``x`` are not considered: a region
    with too many values gives up its last ones."""
    grower = Grower(Region((anchor,), eager=scope.eager), scope, {})
    return x in grower.run(early=True, last=x).values


def _fewer_tiles(first: "Grower") -> "Grower":
    """``first``, or a region with fewer loads that recomputes values as the backward pass does."""
    region, scope, tiles = first.region, first.scope, first.tiles()
    recomputed = {tile for tile in tiles if scope.recomputed(tile)}
    if not recomputed:
        return first
    retry = Region(region.anchors, region.total, lanes=region.lanes, eager=region.eager)
    second = Grower(retry, scope, first.bans, tiles - recomputed)
    second.run(early=False)
    return second if len(second.tiles()) < len(tiles) else first


class Grower(Tile):
    """Grows its region: nodes are absorbed one by one, in the order of the graph. A later ban of a
    node undoes only decisions since it was first considered."""

    def __init__(
        self, region: Region, scope: Scope, bans: Bans, loaded: AbstractSet[Node] = frozenset()
    ):
        super().__init__(region, scope, bans, loaded)
        self.roots = {*region.anchors, region.total, *region.lanes}
        #: Nodes that stay outside, whatever else is absorbed.
        self.outside: Bans = {}
        self.visited: set[Node] = set()
        self.frontier: list[Node] = []
        self.started = self._start()
        self.end = self._state()

    def _start(self) -> bool:
        """Add the products to the region. Returns False if nothing can be absorbed."""
        region = self.region
        if region.total is not None:
            self._sum(region.total)
        for node, kind in zip(routes_of(self.anchor), ROUTES, strict=True):
            if node is not None:
                region.operand(node, kind)
        if region.lanes:
            region.values[self.anchor] = f"{self.anchor.name} (read by columns)"
            region.values |= {node: region.accs[lane] for node, lane in region.lanes.items()}
        elif region.total is None:
            for anchor, acc in zip(region.anchors, region.accs, strict=True):
                region.values[anchor] = acc
                if (why := self._begin(anchor, acc)) is not None:
                    region.refusals[anchor] = why
                    return False
        self.visited = {region.total} if region.total is not None else set(region.anchors)
        self.visited |= {*region.lanes}
        for root in self.visited:
            self._reach(root)
        return True

    def run(self, *, early: bool, last: Node | None = None) -> Region:
        """Grow as far as possible, or up to ``last``. ``early``: ban what can never be stored."""
        checked = len(self.history)
        while self.frontier and (last is None or self.frontier[0] <= last):
            node = heapq.heappop(self.frontier)
            if node in self.visited:
                continue
            if (reason := self._final_refusal(node)) is not None:
                self.visited.add(node)
                self.outside[node] = reason
                continue
            inside = self.region.values, self.region.reduces
            if not any(n in part for n in node.all_input_nodes for part in inside):
                continue  # what reached it was taken back
            self.visited.add(node)
            self._mark(node, len(self.history))
            self.history.append((node, self._state()))
            reduces = node.target in REDUCTIONS
            reason = self._reduction(node) if reduces else unroll(self._lower(node))
            if reason is None:
                self._reach(node)
            else:
                self.region.refusals[node] = reason
            if early and len(self.history) - checked > len(self.region.values):
                if not any(map(self.scope.recomputed, self.tiles())):
                    early = self.ban(unstorable(self.region, self._is_final))
                checked = len(self.history)
        self.end = self._state()
        if self.started and self.anchor not in self.scope.forward:
            self._recomputed_operands()
        return self.region

    def ban(self, troubles: Bans) -> bool:
        """Exclude ``troubles`` from the region. Returns False if they include a root, or nodes that
        are banned already. Growing continues at the first of them."""
        for node, reason in troubles.items():
            if node in self.roots or node in self.bans:
                return False
            self.bans[node] = reason
            first = self.starts.get(node, len(self.history))
            self._restore(self.history[first][1] if first < len(self.history) else self.end)
            for undone, _ in self.history[first:]:
                self.visited.discard(undone)
                heapq.heappush(self.frontier, undone)
            del self.history[first:]
        return True

    def finish(self) -> Region:
        """The complete region, with all reasons, in the order of the graph."""
        if self.started:
            values = [*self.region.values]
            absorbed = (*values[: self.end[0][0]], *self.region.reduces)
            reached = {user for node in absorbed for user in node.users}
            refusals = {n: self.outside[n] for n in reached if n in self.outside}
            refusals |= self.region.refusals
            self.region.refusals = {node: refusals[node] for node in sorted(refusals)}
        return self.region

    def _reach(self, node: Node) -> None:
        for user in node.users:
            if user not in self.visited:
                heapq.heappush(self.frontier, user)

    def _is_final(self, node: Node) -> bool:
        """Is it certain that ``node`` stays outside if it is not inside now?"""
        final = node in self.visited or node in self.bans
        return final and (self.anchor in self.scope.forward or not self.scope.recomputed(node))

    def _sum(self, total: Node) -> None:
        """Absorb the terms of a sum, and the nodes between the terms and ``total``. They have no
        value of their own, because only the sum is read."""
        todo = [total]
        while todo:
            node = todo.pop()
            self.region.values[node] = f"{node.name} (part of a sum)"
            if node not in self.region.anchors:  # views also have sizes among their inputs
                todo += [n for n in node.all_input_nodes if isinstance(fake(n), torch.Tensor)]
        self.region.values[total] = "acc"

    def _final_refusal(self, node: Node) -> Refusal | None:
        """The reason why no larger region can absorb ``node``, if that is certain; else None."""
        if node in self.bans:
            return self.bans[node]
        if node.op == "output":
            return refuse("no-neighbours", "it is an output of the graph")
        if not self.scope.same_side(node, self.anchor):
            return refuse("not-on-tile", "it belongs to the other pass (forward or backward)")
        if checkpoint(node) != checkpoint(self.anchor):
            text = "the border of an activation checkpoint is between it and the GEMM"
            return refuse("checkpoint-border", text)
        return None if node.target in REDUCTIONS else self._misfit(node)

    def _recomputed_operands(self) -> None:
        """Absorb GEMM operands that the backward pass recomputes from tiles of this region, like
        the activation that the weight gradient reads. They cost one store each."""
        tiles = self.tiles()
        inside = {*self.region.values, *self.bans}

        def copies(node: Node) -> list[Node]:
            users = [u for u in node.users if self.scope.recomputed(u) or renames(u)]
            return [u for u in users if u not in inside]

        for node in sorted(closure([user for tile in tiles for user in copies(tile)], copies)):
            if not renames_or_casts(node):
                self._recomputed_operand(node, tiles)

    def _recomputed_operand(self, node: Node, tiles: set[Node]) -> None:
        names, users = readers(node, renames_or_casts)
        transposed = [u for reader in users if is_transpose(reader) for u in reader.users]
        reads = any(u.target in (*GEMMS, CAST, WGRAD) for u in (*users, *transposed))
        if not reads or self._is_needed_by(node):
            return
        state = self._state()
        lowered = all((self._misfit(n) or unroll(self._lower(n))) is None for n in names)
        self.extras += names
        if not lowered or self.tiles() != tiles or len(self.region.stored()) > MAX_STORES:
            self._restore(state)

    def _is_needed_by(self, node: Node) -> bool:
        inputs = {n for n, _ in self.region.operands}
        inputs |= {n for a in self.region.anchors for n in a.all_input_nodes}
        last = max(inputs)
        outside = closure(
            [node], lambda n: [u for u in n.users if not last < u and u not in self.region.values]
        )
        return not inputs.isdisjoint(outside)
