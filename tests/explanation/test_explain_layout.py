# SPDX-License-Identifier: Apache-2.0
"""The layout of any small graph: nothing overlaps, arrows point down, few crossings."""

import random

import pytest
from test_explain_page import apart, label, rectangle

from coda_inductor.explanation.block import repeated, split
from coda_inductor.explanation.layout import Box, Edge, _crossings, _shortest, layout


def random_graph(seed):
    draw = random.Random(seed)  # noqa: S311 (a test's graph is no secret)
    boxes = [Box(str(i), draw.uniform(60, 200), draw.uniform(20, 120)) for i in range(14)]
    edges = [
        Edge(str(j), str(i), "8.4 MB", 50.0)
        for i in range(1, 14)
        for j in draw.sample(range(i), min(i, draw.choice((1, 1, 2, 3))))
    ]
    return boxes, edges


@pytest.mark.parametrize("seed", range(8))
def test_nothing_overlaps(seed):
    boxes, edges = random_graph(seed)
    width, height = layout(boxes, edges)
    where = {box.key: box for box in boxes}
    for i, box in enumerate(boxes):
        assert all(apart(rectangle(box), rectangle(other)) for other in boxes[:i])
        assert 0 <= box.x <= box.x + box.width <= width + 0.01
        assert 0 <= box.y <= box.y + box.height <= height + 0.01
    labels = [label(edge) for edge in edges]
    for i, one in enumerate(labels):
        assert all(apart(one, other) for other in labels[:i])
        assert all(apart(one, rectangle(box)) for box in boxes)
    for edge in edges:
        start, end = where[edge.source], where[edge.target]
        assert start.y + start.height < end.y
        assert start.x <= edge.points[0][0] <= start.x + start.width
        assert end.x <= edge.points[-1][0] <= end.x + end.width


def test_labels_lie_near_the_heads_of_their_arrows():
    """Where one box fans out, a label further up could belong to any of its arrows."""
    boxes = [Box("top", 60.0, 30.0), *(Box(str(i), 140.0, 30.0) for i in range(5))]
    edges = [Edge("top", str(i), "8.4 MB", 50.0) for i in range(5)]
    layout(boxes, edges)
    for edge in edges:
        nearest = min(edges, key=lambda e: abs(e.points[-1][0] - edge.label_at[0]))
        assert nearest is edge


def test_a_chain_hangs_straight():
    boxes = [Box(str(i), 60.0 + 20 * (i % 3), 30.0) for i in range(12)]
    layout(boxes, [Edge(str(i), str(i + 1)) for i in range(11)])
    middles = [box.middle for box in boxes]
    assert max(middles) - min(middles) < 0.5


def test_crossings_are_undone():
    boxes = [Box(k, 50, 20) for k in ("a", "b", "c", "d", "e", "f")]
    edges = [Edge(*pair) for pair in ("af", "be", "cd")]
    layout(boxes, edges)
    where = {box.key: box for box in boxes}
    links = [(where[e.source], where[e.target]) for e in edges]
    rows = [sorted(boxes[:3], key=lambda b: b.x), sorted(boxes[3:], key=lambda b: b.x)]
    assert _crossings(rows, links) == 0


def test_the_least_total_length_is_found():
    """Three boxes in a row, 10 apart; the heaviest pulls win, the others give way."""
    gaps = {("a", "b"): 10, ("b", "c"): 10}
    x = _shortest("abcst", gaps, {("s", "a"): 1, ("s", "c"): 5, ("t", "c"): 5, ("t", "b"): 1})
    assert x["b"] - x["a"] == x["c"] - x["b"] == 10
    assert x["s"] == x["t"] == x["c"]


def test_a_long_edge_hangs_straight():
    boxes = [Box(str(i), 60.0 + 20 * (i % 3), 30.0) for i in range(5)]
    edges = [Edge(str(i), str(i + 1)) for i in range(4)]
    edges.append(Edge("0", "4", "8.4 MB", 50.0))
    layout(boxes, edges)
    assert len({x for x, _ in edges[-1].points[1:-1]}) == 1


def test_what_repeats_is_found():
    layer = ["self_attn.q", "self_attn.o", "mlp.up", "mlp.down"]
    model = [f"model.layers.{i}.{name}" for i in range(5) for name in layer]
    assert repeated([*model, "lm_head"]) == "model.layers.2"
    assert repeated(["0", "2", "4"]) is None  # nn.Sequential: products, not blocks
    assert repeated(["enc.0.a", "enc.0.b", "lm_head"]) is None  # one layer does not repeat
    assert repeated([f"{i}.{name}" for i in range(2) for name in layer]) == "1"
    assert split("model.layers.3.mlp.up") == ("model.layers", 3, "mlp.up")
