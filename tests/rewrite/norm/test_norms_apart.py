# SPDX-License-Identifier: Apache-2.0
"""RMSNorms whose input a kernel of Inductor's makes: behind a residual that another norm made
(Gemma 2 and 3), behind dropout, a softmax. They wait as others do; their gradients stay where no
GEMM makes them. In float64, where a wrong identity shows far above the rounding.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, leave_custom_ops, randn
from harness import Harness
from passes import codes
from torch import nn
from torch.utils.checkpoint import checkpoint

from coda_inductor.graph.gemms import GEMMS
from coda_inductor.graph.nodes import aten, readers
from coda_inductor.refusal import refuse
from coda_inductor.select.policy import Policy

D, HIDDEN = 16, 24
EPS = 1e-2  # large beside mean(x^2), so that an eps in the wrong place shows


class Block(nn.Module):
    """A norm before and behind a projection and a gated MLP."""

    def __init__(self, weighted: bool = True):
        super().__init__()
        self.norms = nn.ModuleList(
            nn.RMSNorm(D, eps=EPS, elementwise_affine=weighted) for _ in range(4)
        )
        self.v, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up = nn.Linear(D, HIDDEN, bias=False), nn.Linear(D, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, D, bias=False)
        for norm in self.norms if weighted else ():
            nn.init.normal_(norm.weight)

    def forward(self, x):
        before, behind, before_mlp, behind_mlp = self.norms
        # A scan stands for attention: nothing of it can run on a tile.
        x = x + behind(self.o(self.v(before(x)).cumsum(1)))
        n = before_mlp(x)
        return x + behind_mlp(self.down(F.gelu(self.gate(n)) * self.up(n)))


def model(layers: int, weighted: bool = True) -> nn.Sequential:
    return nn.Sequential(*(Block(weighted) for _ in range(layers))).double()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_sandwich_norms_wait_but_the_first_and_those_that_residuals_read(weighted, dynamic):
    layers = 2
    harness = check(model(layers, weighted), randn(2, 5, D), dynamic=dynamic)
    # Statistics of the norms behind projections; the last two leave no tile for anything else.
    assert harness.counts == {"rms_norm": 2 * layers - 1, "epilogue": 2 * layers}
    assert codes(harness) >= {"norm-input-no-gemm", "norm-read-elsewhere"}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_are_rewritten_where_gemms_make_them(weighted, dynamic):
    """Those of the MLP's norm; the projection's, which the scan makes, stay."""
    layers = 2
    harness = check_gradients(
        model(layers, weighted), randn(2, 5, D).requires_grad_(), dynamic=dynamic
    )
    assert harness.counts["rms_norm"] == 2 * layers - 1
    assert harness.counts["rms_norm_backward"] == layers
    assert harness.counts["residual"] == layers  # the stream's gradient is added there


def test_epilogues_alone_read_the_statistics(monkeypatch):
    leave_custom_ops(monkeypatch)
    harness = check(model(2), randn(2, 5, D))
    rstds = [n for n in harness.graph.nodes if n.target is aten.rsqrt.default]
    waits = [n for n in rstds if all("epilogue" in str(u.target) for u in readers(n)[1])]
    assert (len(rstds), len(waits)) == (4 * 2, 2 * 2 - 1)


@pytest.mark.parametrize("late", [True, False])
def test_kept_for_the_backward_pass_is_no_more_than_without(late, monkeypatch):
    """In 16 bits, of a size at which a vector does not matter."""
    leave_custom_ops(monkeypatch)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.o, self.q = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
            self.n1, self.n2 = nn.RMSNorm(256), nn.RMSNorm(256)

        def forward(self, x):
            x = x + self.n1(self.o(x.sin()))
            z = self.q(self.n2(x))
            return x + (z.cumsum(0) if late else self.o(F.gelu(z)))

    wide, x = Wide().bfloat16(), randn(512, 256, dtype=torch.bfloat16).requires_grad_()
    kept = []
    for disable in ([], ["norm"]):
        harness = Harness(disable=disable)
        harness.train(wide, x).sum().backward()
        kept.append(harness.saved_bytes())
        assert harness.counts["rms_norm"] == (0 if disable else 1)
    assert kept[0] <= 1.02 * kept[1]


def behind_norm(x, w, gamma, a):
    stream = x + F.rms_norm(F.linear(x, w), (D,), gamma, EPS)
    return F.linear(F.rms_norm(stream, (D,), gamma + 1, EPS), a).cumsum(0)


def activated(x, w, gamma, a):
    stream = x + F.rms_norm(F.linear(x, w), (D,), gamma, EPS)
    return F.linear(F.rms_norm(stream, (D,), gamma + 1, EPS), a).sin()


def behind_two_norms(x, w, gamma, a):
    stream = F.rms_norm(F.rms_norm(x, (D,), gamma, EPS) + x, (D,), gamma, EPS)
    return F.linear(F.rms_norm(stream + x, (D,), None, EPS), a).cumsum(0) + w[0, 0]


def behind_softmax(x, w, gamma, a):
    return F.linear(F.rms_norm(F.linear(x, w).softmax(-1), (D,), gamma, EPS), a).cumsum(0)


def behind_layer_norm(x, w, gamma, a):
    stream = x + F.layer_norm(F.linear(x, w), (D,), gamma)
    return F.linear(F.rms_norm(stream, (D,), gamma, EPS), a).cumsum(0)


def two_readers(x, w, gamma, a):
    stream = x + F.rms_norm(F.linear(x, w), (D,), gamma, EPS)
    n = F.rms_norm(stream, (D,), gamma, EPS)
    return F.linear(n, a).cumsum(0), F.linear(n, a * 2), stream


LATE = (behind_norm, behind_two_norms, behind_softmax, behind_layer_norm, two_readers)


@pytest.mark.parametrize("function", LATE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("frozen", ["", "weights", "input"])
def test_gradients_that_no_gemm_makes_stay(function, frozen):
    """The norm waits; its own gradient is eager's formula, of what is made anew."""
    weights = Weights(function, randn(D, D), randn(D), randn(HIDDEN, D))
    weights.requires_grad_(frozen != "weights")
    x = randn(2, 5, D).requires_grad_(frozen != "input")
    harness = check_gradients(weights, x)
    assert harness.counts["rms_norm"] == 1
    assert harness.counts["rms_norm_backward"] == 0


def test_gradient_that_stays_multiplies_what_it_did():
    """No gradient is stored a second time, scaled: the backward pass multiplies as many tensors of
    a size as without the rewrite."""
    weights = Weights(behind_norm, randn(D, D), randn(D), randn(HIDDEN, D))

    def factors(**options):
        harness = Harness(**options)
        harness.train(weights, randn(2, 5, D).requires_grad_()).sum().backward()
        nodes = [n for n in harness.parts[1].nodes if n.target in GEMMS]
        return sorted(tuple(map(int, i.meta["val"].shape)) for n in nodes for i in n.args[:2])

    assert factors() == factors(disable=["norm"])


def test_checkpointed_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    harness = check_gradients(Model().double(), randn(2, 5, D).requires_grad_())
    assert harness.counts["rms_norm"] == 2 * 3 - 1
    without = check_gradients(Model().double(), randn(2, 5, D).requires_grad_(), disable=["norm"])
    assert harness.saved_bytes() <= without.saved_bytes()


def looked_up(tokens, table, w):
    return F.linear(F.rms_norm(F.embedding(tokens, table) * 4.0, (D,), None, EPS), w)


def test_a_lookup_keeps_its_norm():
    harness = check(looked_up, torch.arange(7), randn(9, D), randn(HIDDEN, D))
    assert "norm-input-no-gemm" in codes(harness)
    assert harness.counts["rms_norm"] == 0


def test_a_layer_norm_stays():
    def function(x, w, gamma, a):
        stream = x + F.layer_norm(F.linear(x, w), (D,), gamma)
        return F.linear(F.layer_norm(stream, (D,), gamma), a)

    harness = check(function, randn(5, D), randn(D, D), randn(D), randn(HIDDEN, D))
    assert "norm-input-no-gemm" in codes(harness)
    assert harness.counts["layer_norm"] == 0


def test_what_policy_says_keeps_the_norm(monkeypatch):
    """As on a GPU by default."""
    why = refuse("norm-apart-unmeasured", "never measured")
    monkeypatch.setattr(Policy, "apart_norm_loses", lambda _self, _gemm: why)
    harness = check(activated, randn(5, D), randn(D, D), randn(D), randn(HIDDEN, D))
    assert "norm-apart-unmeasured" in codes(harness)
    assert harness.counts["rms_norm"] == 0
