# SPDX-License-Identifier: Apache-2.0
"""Layered layout of a small directed acyclic graph (Sugiyama, Tagawa and Toda, 1981).

1. layers: each box as early as its inputs allow, then pulled down to its first reader;
2. edges over several layers get a waypoint in each layer between;
3. order within a layer: barycentres of the neighbours, sweeping down and up; the best order by
   number of crossings is kept;
4. x: each box as near to its neighbours' mean as its own neighbours in the layer allow, which is
   an isotonic regression (pool adjacent violators), sweeping as well; then long edges are made
   straight where there is room;
5. an edge ends in a straight stem above the box that it enters, on which its label sits; the labels
   of a gap take as many rows as they need.

Sizes are in pixels; x grows to the right, y downwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SIDE_GAP = 22.0
LAYER_GAP = 30.0
LABEL_HEIGHT = 17.0
_SWEEPS = 12
_FOLLOWER = 0.02


@dataclass(eq=False)
class Box:
    """A node: its size, and after :func:`layout` its upper left corner."""

    key: str
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    layer: int = 0
    real: bool = True

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(eq=False)
class Edge:
    """An arrow; after :func:`layout` its ``points`` (downwards, two a layer crossed) and where the
    middle of its label lies."""

    source: str
    target: str
    label: str = ""
    label_width: float = 0.0
    weight: float = 1.0
    points: list[tuple[float, float]] = field(default_factory=list)
    label_at: tuple[float, float] = (0.0, 0.0)


def layout(boxes: Sequence[Box], edges: Sequence[Edge]) -> tuple[float, float]:
    """Place ``boxes`` and route ``edges``, in place; returns (width, height) of it all."""
    by_key = {box.key: box for box in boxes}
    _assign_layers(boxes, edges, by_key)
    chains = {edge: _chain(edge, by_key) for edge in edges}
    rows: dict[int, list[Box]] = defaultdict(list)
    for box in (*boxes, *(b for chain in chains.values() for b in chain[1:-1])):
        rows[box.layer].append(box)
    layers = [rows[i] for i in sorted(rows)]
    links = [pair for chain in chains.values() for pair in pairwise(chain)]
    _order(layers, links)
    _place(layers, links)
    for chain in chains.values():
        _straighten(chain[1:-1], layers)
    left = min((b.x for layer in layers for b in layer), default=0.0)
    for layer in layers:
        for box in layer:
            box.x -= left
    _route(layers, chains)
    boxed = [b.x + b.width for layer in layers for b in layer]
    labelled = [e.label_at[0] + e.label_width / 2 for e in edges]
    height = max((b.y + b.height for layer in layers for b in layer), default=0.0)
    shift = max(0.0, -min((e.label_at[0] - e.label_width / 2 for e in edges), default=0.0))
    if shift:
        for layer in layers:
            for box in layer:
                box.x += shift
        for edge in edges:
            edge.points = [(x + shift, y) for x, y in edge.points]
            edge.label_at = (edge.label_at[0] + shift, edge.label_at[1])
    return max([*boxed, *labelled], default=0.0) + shift, height


def _assign_layers(boxes: Sequence[Box], edges: Sequence[Edge], by_key: dict[str, Box]) -> None:
    inputs, outputs = defaultdict(list), defaultdict(list)
    for edge in edges:
        inputs[edge.target].append(by_key[edge.source])
        outputs[edge.source].append(by_key[edge.target])
    for box in boxes:  # given in topological order
        box.layer = max((b.layer + 1 for b in inputs[box.key]), default=0)
    for box in reversed(boxes):
        if not inputs[box.key] and outputs[box.key]:
            box.layer = min(b.layer for b in outputs[box.key]) - 1


def _chain(edge: Edge, by_key: dict[str, Box]) -> list[Box]:
    source, target = by_key[edge.source], by_key[edge.target]
    points = [
        Box(f"{edge.source}->{edge.target}@{i}", 8.0, 0.0, layer=i, real=False)
        for i in range(source.layer + 1, target.layer)
    ]
    return [source, *points, target]


def _order(layers: list[list[Box]], links: list[tuple[Box, Box]]) -> None:
    above, below = defaultdict(list), defaultdict(list)
    for upper, lower in links:
        above[lower].append(upper)
        below[upper].append(lower)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, links)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for layer in layers if down else reversed(layers):
            rank = {box: i for other in layers for i, box in enumerate(other)}
            wanted = {
                box: sum(rank[n] for n in near[box]) / len(near[box]) if near[box] else rank[box]
                for box in layer
            }
            layer.sort(key=wanted.__getitem__)
        crossings = _crossings(layers, links)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    for layer, kept in zip(layers, best, strict=True):
        layer[:] = kept


def _crossings(layers: list[list[Box]], links: list[tuple[Box, Box]]) -> int:
    rank = {box: i for layer in layers for i, box in enumerate(layer)}
    by_layer = defaultdict(list)
    for upper, lower in links:
        by_layer[upper.layer].append((rank[upper], rank[lower]))
    total = 0
    for pairs in by_layer.values():
        for i, (a, b) in enumerate(pairs):
            total += sum((a - c) * (b - d) < 0 for c, d in pairs[:i])
    return total


def _place(layers: list[list[Box]], links: list[tuple[Box, Box]]) -> None:
    above, below, near = defaultdict(list), defaultdict(list), defaultdict(list)
    entered = {lower for _, lower in links}
    left = {upper for upper, _ in links}
    for upper, lower in links:
        # Waypoints in line make straight edges: they pull harder than boxes do. What only enters
        # or only leaves (a stub, a weight's gradient) stands beside the main line and follows it.
        pull = 1.0 if upper.real and lower.real else 2.0 if upper.real or lower.real else 8.0
        onto_lower = pull if upper in entered else _FOLLOWER
        onto_upper = pull if lower in left else _FOLLOWER
        above[lower].append((upper, onto_lower))
        below[upper].append((lower, onto_upper))
        near[lower].append((upper, onto_lower))
        near[upper].append((lower, onto_upper))
    followers = {b for layer in layers for b in layer if b not in entered or b not in left}
    for layer in layers:
        x = 0.0
        for box in layer:
            box.x, x = x, x + box.width + SIDE_GAP
        for box in layer:
            box.x -= x / 2
    # One side at a time moves whole chains at once; both sides at a time evens out what is left.
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            _align(layer, above if down else below, followers)
    for sweep in range(8 * _SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _align(layer, near, followers)


def _align(layer: list[Box], near: dict[Box, list[tuple[Box, float]]], followers: set[Box]) -> None:
    """Move the boxes of one layer to where their neighbours want them, in order and apart; where
    not all can have their way, followers give way."""
    offset, offsets, wanted, weights = 0.0, [], [], []
    for box in layer:
        pulls = near[box]
        total = sum(pull for _, pull in pulls)
        middle = sum(b.middle * pull for b, pull in pulls) / total if total else box.middle
        offsets.append(offset)
        wanted.append(middle - box.width / 2 - offset)
        weights.append(_FOLLOWER if box in followers or not total else total)
        offset += box.width + SIDE_GAP
    for box, at, x in zip(layer, offsets, _isotonic(wanted, weights), strict=True):
        box.x = x + at


def _straighten(waypoints: list[Box], layers: list[list[Box]]) -> None:
    """Give runs of an edge's waypoints one x, as far as the boxes beside them leave room."""
    run: list[Box] = []
    low, high = -math.inf, math.inf
    for point in [*waypoints, None]:
        room = _room(point, layers[point.layer]) if point is not None else (math.inf, -math.inf)
        if max(low, room[0]) <= min(high, room[1]):
            run, low, high = [*run, point] if point else run, max(low, room[0]), min(high, room[1])
            continue
        wanted = sum(p.x for p in run) / len(run) if run else 0.0
        for other in run:
            other.x = min(max(wanted, low), high)
        if point is not None:
            run, (low, high) = [point], room


def _room(point: Box, layer: list[Box]) -> tuple[float, float]:
    """Where the left side of a waypoint may lie."""
    at = layer.index(point)
    low = layer[at - 1].x + layer[at - 1].width + SIDE_GAP if at else -math.inf
    high = layer[at + 1].x - SIDE_GAP - point.width if at + 1 < len(layer) else math.inf
    return min(low, point.x), max(high, point.x)


def _isotonic(values: list[float], weights: list[float] | None = None) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in (weighted) least squares."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, heavy, size = pools.pop()
            mean = (mean * total + other * heavy) / (total + heavy)
            total, count = total + heavy, count + size
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _route(layers: list[list[Box]], chains: dict[Edge, list[Box]]) -> None:
    """Set y of the boxes, points of the edges, and the labels."""
    leaving, entering = _ports(chains, out=True), _ports(chains, out=False)
    y, stems = 0.0, []
    for number, layer in enumerate(layers):
        height = max(box.height for box in layer)
        for box in layer:
            box.y = y
            box.height = box.height if box.real else height
        arriving = [e for e, chain in chains.items() if chain[-1].layer == number + 1]
        rows = _label_rows(arriving, entering)
        count = max(rows.values(), default=-1) + 1
        y += height + LAYER_GAP * (1.9 if count else 1.2) + count * LABEL_HEIGHT
        bottom = y - LAYER_GAP * 0.5
        stems.append(bottom - count * LABEL_HEIGHT)
        for edge, row in rows.items():
            edge.label_at = (entering[edge], bottom - (row + 0.5) * LABEL_HEIGHT)
    for edge, chain in chains.items():
        points = [(leaving[edge], chain[0].y + chain[0].height)]
        for box in chain[1:-1]:
            points += [(box.middle, box.y), (box.middle, box.y + box.height)]
        stem = (entering[edge], stems[chain[-1].layer - 1])
        edge.points = [*points, stem, (entering[edge], chain[-1].y)]


def _ports(chains: dict[Edge, list[Box]], *, out: bool) -> dict[Edge, float]:
    """Where on the box's border each edge leaves or enters, in the order of the other ends."""
    groups = defaultdict(list)
    for edge, chain in chains.items():
        box, other = (chain[0], chain[1]) if out else (chain[-1], chain[-2])
        groups[box].append((other.middle, edge))
    ports = {}
    for box, ends in groups.items():
        ends.sort(key=lambda end: end[0])
        step = box.width * 0.8 / len(ends)
        for i, (_, edge) in enumerate(ends):
            ports[edge] = box.middle + (i - (len(ends) - 1) / 2) * step
    return ports


def _label_rows(edges: list[Edge], entering: dict[Edge, float]) -> dict[Edge, int]:
    """A row for each label of one gap, so that labels of one row lie apart."""
    ends: list[float] = []
    rows = {}
    for edge in sorted((e for e in edges if e.label), key=entering.__getitem__):
        left = entering[edge] - edge.label_width / 2
        row = next((i for i, end in enumerate(ends) if end + 4 <= left), len(ends))
        ends[row : row + 1] = [left + edge.label_width]
        rows[edge] = row
    return rows
