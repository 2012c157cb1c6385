# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits that are infinite or NaN, on and off the target: as in eager."""

import math

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn

from coda_inductor.runtime import linear_cross_entropy

V, D = 300, 16
IGNORED = 5
#: What is added to one row of logits, at the target and elsewhere.
EDGES = {
    "none": (0.0, 0.0),
    "inf off the target": (0.0, math.inf),
    "inf on the target": (math.inf, 0.0),
    "both inf": (math.inf, math.inf),
    "-inf off the target": (0.0, -math.inf),
    "-inf on the target": (-math.inf, 0.0),
    "NaN off the target": (0.0, math.nan),
    "NaN on the target": (math.nan, 0.0),
    "inf beside -inf": (-math.inf, math.inf),
}


def rows():
    """(M, V) to add to logits, and targets (M,): every edge, with a target that counts and with an
    ignored one; then rows of one value only."""
    edges, targets = [], []
    for target in (7, IGNORED):
        for on, off in EDGES.values():
            row = torch.zeros(V, dtype=torch.float64)
            row[target], row[200] = on, off
            edges.append(row)
        edges += [torch.full((V,), number).double() for number in (-math.inf, math.inf)]
        targets += [target] * (len(EDGES) + 2)
    return torch.stack(edges), torch.tensor(targets)


def losses(reduction, smoothing):
    def function(x, w, edges, targets):
        logits = F.linear(x, w) + edges
        how = {"label_smoothing": smoothing, "reduction": reduction}
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, **how)

    return function


@pytest.mark.parametrize(
    ("smoothing", "sliced"), [(0.0, False), (0.1, False), (1.0, False), (0.0, True), (0.1, True)]
)
def test_every_row_and_its_gradient(smoothing, sliced, monkeypatch):
    edges, targets = rows()
    if sliced:
        monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", len(targets) * 8 * 128)
    x, w = randn(len(targets), D).requires_grad_(), randn(V, D)
    edges.requires_grad_(not sliced)
    harness = check_gradients(losses("none", smoothing), x, w, edges, targets)
    assert harness.counts["cross_entropy"] == 1
    assert harness.counts["cross_entropy_backward"] == sliced


def test_one_such_row_among_others():
    """Of each kind a loss of its own, in one graph."""
    _, targets = rows()
    edges = torch.zeros(len(EDGES), 4, V, dtype=torch.float64)
    for each, (on, off) in zip(edges, EDGES.values(), strict=True):
        each[2, targets[2]], each[2, 200] = on, off

    def function(x, ws, edges, targets):
        each = zip(ws, edges, strict=True)
        found = [losses("mean", 0.0)(x, w, edge, targets) for w, edge in each]
        return found, losses("sum", 0.0)(x, ws[-1] + 1, edges[3], targets)

    check(function, randn(4, D), randn(len(EDGES), V, D), edges, targets[:4])
