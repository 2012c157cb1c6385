# SPDX-License-Identifier: Apache-2.0
"""Layered layout of a small directed acyclic graph, by the method of Graphviz' dot (Gansner,
Koutsofios, North and Vo, 1993), with networkx in place of dot's own solvers.

1. layers: each box as early as its inputs allow, an input right above its first reader;
2. an edge gets a waypoint in each layer that it crosses. Between two layers of boxes lies one of
   labels: a label is a waypoint that has a size, right above the box that its edge enters;
3. order within a layer: barycentres of the neighbours, sweeping down and up; the best order by
   number of crossings is kept;
4. x: the least total length of all edges, the long ones weighing most, so that they hang straight.
   This is a linear program, the dual of a flow of least cost.

Sizes are in pixels; x grows to the right, y downwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

SIDE_GAP, LAYER_GAP, LABEL_HEIGHT = 22, 16, 17
_SWEEPS = 12


@dataclass(eq=False)
class Box:
    """A node or a waypoint: its size, and after :func:`layout` its upper left corner."""

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
    _assign_layers(edges, by_key)
    chains = {edge: _chain(edge, by_key) for edge in edges}
    rows: dict[int, list[Box]] = defaultdict(list)
    for box in (*boxes, *(b for chain in chains.values() for b in chain[1:-1])):
        rows[box.layer].append(box)
    layers = [rows[i] for i in sorted(rows)]
    links = [pair for chain in chains.values() for pair in pairwise(chain)]
    _order(layers, links)
    _place(layers, links)
    y = 0.0
    for layer in layers:
        for box in layer:
            box.y = y
        height = max(box.height for box in layer)
        for box in layer:
            box.height = box.height if box.real else height
        y += height + LAYER_GAP
    _route(chains)
    return max((box.x + box.width for layer in layers for box in layer), default=0.0), y


def _assign_layers(edges: Sequence[Edge], boxes: Mapping[str, Box]) -> None:
    graph = nx.DiGraph((edge.source, edge.target) for edge in edges)
    for depth, generation in enumerate(nx.topological_generations(graph)):
        for key in generation:
            boxes[key].layer = 2 * depth
    for key in graph:
        if not graph.in_degree(key):
            boxes[key].layer = min(boxes[reader].layer for reader in graph[key]) - 2


def _chain(edge: Edge, boxes: Mapping[str, Box]) -> list[Box]:
    source, target = boxes[edge.source], boxes[edge.target]
    points = [
        Box("", 8.0, 0.0, layer=layer, real=False)
        for layer in range(source.layer + 1, target.layer)
    ]
    points[-1].width, points[-1].height = max(edge.label_width, 8.0), LABEL_HEIGHT
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
    return sum(
        (a - c) * (b - d) < 0
        for pairs in by_layer.values()
        for i, (a, b) in enumerate(pairs)
        for c, d in pairs[:i]
    )


def _place(layers: list[list[Box]], links: list[tuple[Box, Box]]) -> None:
    """Set x of every box: by their middles, in whole pixels. A label is pulled to the head of its
    arrow, a waypoint to the next one."""
    gaps = {
        (left, right): int((left.width + right.width) / 2 + (SIDE_GAP if left.real else 8)) + 1
        for layer in layers
        for left, right in pairwise(layer)
    }
    pulls = {(a, b): 2 if a.real else 5 if b.real else 8 for a, b in links}
    middles = _shortest([box for layer in layers for box in layer], gaps, pulls)
    for box, middle in middles.items():
        box.x = middle - box.width / 2
    left = min((box.x for box in middles), default=0.0)
    for box in middles:
        box.x -= left


def _shortest(
    nodes: Sequence[Box],
    gaps: Mapping[tuple[Box, Box], int],
    pulls: Mapping[tuple[Box, Box], int],
) -> dict[Box, int]:
    """The x of each node with the least sum of ``pull * |x[a] - x[b]|`` where each gap holds:
    ``x[b] - x[a] >= gap``. By duality they are the distances that are left over when a flow, which
    each gap rewards and each pull bounds, is greatest."""
    network = nx.DiGraph()
    network.add_nodes_from(nodes)
    network.add_edges_from((a, b, {"weight": -gap}) for (a, b), gap in gaps.items())
    for (a, b), pull in pulls.items():
        network.add_edge(a, b, weight=0, capacity=pull)
        network.add_edge(b, a, weight=0, capacity=pull)
    _, flow = nx.network_simplex(network)
    left = nx.DiGraph()
    left.add_edges_from(("start", node, {"weight": 0}) for node in nodes)
    for a, b, data in network.edges(data=True):
        for start, end, free, cost in (
            (a, b, flow[a][b] < data.get("capacity", float("inf")), data["weight"]),
            (b, a, flow[a][b] > 0, -data["weight"]),
        ):
            if free and cost < left.get_edge_data(start, end, {"weight": float("inf")})["weight"]:
                left.add_edge(start, end, weight=cost)
    distances = nx.single_source_bellman_ford_path_length(left, "start")
    return {node: -distances[node] for node in nodes}


def _route(chains: Mapping[Edge, list[Box]]) -> None:
    """Set points of the edges, and their labels."""
    leaving, entering = _ports(chains, out=True), _ports(chains, out=False)
    for edge, (source, *crossed, target) in chains.items():
        edge.points = [(leaving[edge], source.y + source.height)]
        for box in crossed:
            edge.points += [(box.middle, box.y), (box.middle, box.y + box.height)]
        edge.points.append((entering[edge], target.y))
        edge.label_at = (crossed[-1].middle, crossed[-1].y + LABEL_HEIGHT / 2)


def _ports(chains: Mapping[Edge, list[Box]], *, out: bool) -> dict[Edge, float]:
    """Where on the box's border each edge leaves or enters: straight below or above its other end
    if all of them have room so, else side by side in the order of the other ends."""
    groups = defaultdict(list)
    for edge, chain in chains.items():
        box, other = (chain[0], chain[1]) if out else (chain[-1], chain[-2])
        groups[box].append((other.middle, edge))
    ports = {}
    for box, ends in groups.items():
        ends.sort(key=lambda end: end[0])
        straight = box.x + 10 <= ends[0][0] and ends[-1][0] <= box.x + box.width - 10
        step = box.width * 0.8 / len(ends)
        for i, (middle, edge) in enumerate(ends):
            ports[edge] = middle if straight else box.middle + (i - (len(ends) - 1) / 2) * step
    return ports
