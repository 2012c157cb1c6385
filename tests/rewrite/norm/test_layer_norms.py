# SPDX-License-Identifier: Apache-2.0
"""LayerNorm: every spelling is raised, and deferred in inference with eager's values in float64
(rule R5), or refused with a reason, as all are in training.

``custom op`` keeps the fused calls, whose partials then have several tiles; ``expanded`` runs them
as plain aten. Means are large beside deviations, so that a mean in the wrong place shows.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import (
    Weights,
    check,
    check_gradients,
    leave_custom_ops,
    randn,
)
from harness import Harness
from passes import codes
from torch import nn

from coda_inductor.select import gate

D, HIDDEN, WIDE = 16, 24, 80  # WIDE: a head, wider than all else
EPS = 1e-2  # large beside the variance, so that an eps in the wrong place shows


def squared_by_hand(x, w, b):
    c = x - x.mean(2, keepdim=True)
    return w * (c / ((c * c).mean(-1, keepdim=True) + EPS).sqrt()) + b


def stream(x, w):
    """A residual stream whose mean a LayerNorm in front has computed."""
    return x + F.linear(F.layer_norm(x, (D,)).cumsum(0), w)


def norm(x, w, gamma, beta):
    return F.layer_norm(stream(x, w), (D,), gamma, beta, EPS)


def one(x, w, gamma, beta, a):
    return F.linear(norm(x, w, gamma, beta), a)


def biases_and_no_bias(x, w, gamma, beta, a, bias, b):
    n = norm(x, w, gamma, beta)
    return F.linear(n, a, bias) * F.linear(n, b).tanh()


def shared_weight(x, w, gamma, beta, a):
    n = norm(x, w, gamma, beta)
    return F.linear(n, a).sin() + F.linear(n, a)


def residual(x, w, gamma, beta, up, bias, down):
    x = stream(x, w)
    n = F.layer_norm(x, (D,), gamma, beta, EPS)
    x = x + F.linear(F.gelu(F.linear(n, up, bias)), down)
    return F.linear(F.layer_norm(x, (D,), beta, gamma, EPS), up)


def gated(x, w, gamma, beta, up, gate, down):
    n = norm(x, w, gamma, beta)
    return F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)


def rows_flattened(x, w, gamma, beta, up, down):
    """OPT: the second norm of a block reads the stream as a matrix."""
    x = stream(x, w)
    flat = x.flatten(0, 1)
    n = F.layer_norm(flat, (D,), gamma, beta, EPS)
    return (flat + F.linear(F.relu(F.linear(n, up)), down)).view(x.shape)


UP, DOWN = (HIDDEN, D), (D, HIDDEN)
# name: (function, shapes of its weights behind w, gamma and beta, norms that are deferred)
CASES = {
    "one GEMM": (one, (UP,), 1),
    "by hand, 1 + gamma": (
        lambda x, w, g, b, a: F.linear(squared_by_hand(stream(x, w), 1 + g, b), a),
        (UP,),
        1,
    ),
    "neither": (lambda x, w, g, b, a: F.linear(norm(x, w, None, None), a) * (g + b)[0], (UP,), 1),
    "bias only": (lambda x, w, g, b, a: F.linear(norm(x, w, None, b), a) * g[0], (UP,), 1),
    "one with a bias, one without": (biases_and_no_bias, (UP, (HIDDEN,), UP), 1),
    "shared weight": (shared_weight, (UP,), 1),
    "head wider than 4 d": (one, ((WIDE, D),), 1),
    "residual MLP, two norms": (residual, (UP, (HIDDEN,), DOWN), 2),
    "SwiGLU": (gated, (UP, UP, DOWN), 1),
    "rows flattened": (rows_flattened, (UP, DOWN), 1),
}


def case(name: str) -> tuple[Weights, torch.Tensor, int]:
    """The function with weights, an input (2, 5, D) that wants a gradient, the number of norms."""
    function, shapes, norms = CASES[name]
    shapes = ((D, D), (D,), (D,), *shapes)
    weights = [randn(*s) / (s[-1] ** 0.5 if len(s) == 2 else 1) for s in shapes]
    return Weights(function, *weights), (5 + randn(2, 5, D)).requires_grad_(), norms


#: Those that are tried with the op itself too, whose partials have several tiles.
TILED = ["one GEMM", "shared weight", "head wider than 4 d", "residual MLP, two norms", "SwiGLU"]


@pytest.mark.parametrize(
    ("name", "custom"), [*((name, False) for name in CASES), *((name, True) for name in TILED)]
)
def test_values_are_eagers(name, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    function, x, norms = case(name)
    harness = check(function, x.detach())
    assert harness.counts["layer_norm"] == norms
    assert harness.ops()["aten.rsqrt.default"] == norms + 1  # and the one in front


def test_in_training_it_stays_with_eagers_gradients():
    function, x, _ = case("residual MLP, two norms")
    harness = check_gradients(function, x)
    assert "layer-norm-training" in codes(harness)
    assert harness.counts["layer_norm"] == 0


@pytest.mark.parametrize("name", ["residual MLP, two norms", "rows flattened"])
def test_a_dynamic_size_stays_dynamic(name):
    """Counting the rows of a norm once made its sizes numbers: every length compiled anew."""
    function, *_ = case(name)
    harness, graphs = Harness(), set()
    compiled = torch.compile(function, backend=harness, dynamic=True)
    with torch.no_grad():
        for length in (5, 6, 9):
            x = randn(2, length, D)
            torch.testing.assert_close(compiled(x), function(x))
            graphs.add(harness.graphs)
    assert len(graphs) == 1


def test_nothing_normalized_is_stored(monkeypatch):
    """In front: the stream, h = (x - pivot) gamma and two sums; behind: scale, shift and offset."""
    leave_custom_ops(monkeypatch)
    function, x, _ = case("one GEMM")
    first, second = check(function, x.detach()).fused
    assert len(first.program.stores) == 1  # nothing else reads the stream
    assert [r.axis for r in first.program.reduces] == ["row", "row"]
    assert sorted(o.kind for o in second.program.operands) == ["col", "col", "row", "row"]


def fresh(x, w, gamma, beta, a):
    return F.linear(F.layer_norm(F.linear(x, w), (D,), gamma, beta, EPS), a)


def test_without_a_mean_at_hand_it_stays():
    weights = Weights(fresh, randn(D, D), randn(D), randn(D), randn(HIDDEN, D))
    harness = check(weights, randn(2, 5, D))
    assert "layer-norm-no-mean" in codes(harness)
    assert harness.counts["layer_norm"] == 0


def test_gate_charges_reading_the_weights_again():
    n, k = 16384, 4096
    reason = gate.norm_loses(256, n, k, 2)
    assert reason is not None
    assert reason.code == "layer-norm-slower"
    assert gate.norm_loses(16384, n, k, 2) is None  # the weights are little beside so many rows


class Block(nn.Module):
    """Pre-norm, a projection for attention, an MLP: the mean of the stream is far from zero."""

    def __init__(self, d: int, f: int):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.o, self.up, self.down = nn.Linear(d, d), nn.Linear(d, f), nn.Linear(f, d)
        for parameter in (*self.n1.parameters(), *self.n2.parameters()):
            nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x, y):
        x = x + self.o(self.n1(x) * y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


@pytest.mark.parametrize("mean", [0, 100])
def test_error_in_bfloat16_is_no_larger_than_eagers_whatever_the_mean(mean):
    model = Block(64, 128).bfloat16()
    xs = [(randn(64, 64) + mean).bfloat16(), randn(64, 64, dtype=torch.bfloat16)]
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    harness = Harness(reference=True)
    ours = harness.run(model, *xs).double()
    with torch.no_grad():
        want, theirs = exact(*(x.double() for x in xs)), eager(*xs).double()
    assert harness.counts["layer_norm"] == 1
    assert 0 < (ours - want).norm() <= 1.2 * (theirs - want).norm()
