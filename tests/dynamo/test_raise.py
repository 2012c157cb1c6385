# SPDX-License-Identifier: Apache-2.0
"""Raising: every spelling of an idiom becomes one semantic op; near misses stay, with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, assert_same, check, raised, randn, reasons, swiglu
from harness import Harness
from torch import nn

from coda_inductor.dynamo import idioms
from coda_inductor.matching import Idiom
from coda_inductor.patterns import load
from coda_inductor.semantic.norms import rms_norm

D = 16


def norm(x, w, eps=1e-5):
    h = x.float() if x.dtype == torch.bfloat16 else x
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_eps_none_is_the_epsilon_of_the_compute_dtype(dtype, weighted):
    # With inputs around 1e-3 a wrong eps is off by a factor; with inputs around 1 it hides.
    x, w = randn(4, D, dtype=dtype) * 1e-3, randn(D, dtype=dtype)
    harness = check(lambda x, w: F.rms_norm(x, (D,), w if weighted else None), x, w)
    assert raised(harness, rms_norm) == 1


def test_float32_weight_keeps_the_promoted_dtype():
    x, w = randn(2, 3, D, dtype=torch.bfloat16), randn(D, dtype=torch.float32)
    harness = check(norm, x, w, tolerance=TOLERANCE[torch.bfloat16])
    (op,) = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert op.args[3] == torch.float32


SWIGLUS = {
    "silu first": lambda g, u: F.silu(g) * u,
    "up first": lambda g, u: u * F.silu(g),
    "method": lambda g, u: torch.mul(u, F.silu(g)),
    "module": lambda g, u: nn.SiLU()(g) * u,
    "sigmoid": lambda g, u: g * torch.sigmoid(g) * u,
    "sigmoid first": lambda g, u: u * (g.sigmoid() * g),
    "rounded between": lambda g, u: F.silu(g.float()).to(g.dtype) * u,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SWIGLUS)
def test_every_spelling_of_swiglu_raises_once(spelling, dtype):
    harness = check(SWIGLUS[spelling], randn(3, D, dtype=dtype), randn(3, D, dtype=dtype))
    assert raised(harness, swiglu) == 1
    assert not any("silu" in str(n.target) for n in harness.raised.nodes)


WIDE, NARROW = torch.float32, torch.bfloat16
SILU, WIDENED = SWIGLUS["silu first"], lambda g, u: F.silu(g.float()) * u
NOT_SWIGLU = [
    (SILU, (D,), WIDE, WIDE, "differ in shape"),
    (SILU, (1, D), WIDE, WIDE, "differ in shape"),
    (SILU, (3, 1), WIDE, WIDE, "differ in shape"),
    (WIDENED, (3, D), NARROW, NARROW, "another dtype"),
    (WIDENED, (3, D), NARROW, WIDE, "in another dtype than its input's"),
]


@pytest.mark.parametrize(("function", "shape", "gate", "up", "why"), NOT_SWIGLU)
def test_what_is_not_swiglu_stays(function, shape, gate, up, why):
    harness = check(function, randn(3, D, dtype=gate), randn(*shape, dtype=up))
    assert raised(harness, swiglu) == 0
    assert why in reasons(harness)


def test_changing_the_eps_of_a_trained_norm():
    class Norm(torch.nn.Module):
        eps = 1e-3

        def forward(self, x):
            return norm(x, 1.0, self.eps)

    model, harness = Norm(), Harness()
    compiled = torch.compile(model, backend=harness, dynamic=True)
    graphs = []
    for model.eps in (1e-3, 0.5):
        for rows in (3, 4):
            x = randn(rows, D).requires_grad_()
            gradients = [torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (compiled, model)]
            assert_same(*gradients)
            graphs.append(harness.graphs)
        assert raised(harness, rms_norm) == 1
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3]


def test_idioms_whose_ops_a_graph_lacks_are_not_tried(monkeypatch):
    """Of a norm alone, nothing but norms' idioms; and what a pattern raises may be another's."""
    tried = set()
    match = Idiom.match

    def noted(self, root):
        tried.add(self.name)
        return match(self, root)

    monkeypatch.setattr(Idiom, "match", noted)
    harness = check(norm, randn(3, D), randn(D))
    assert raised(harness, rms_norm) == 1
    assert "swiglu" not in tried
    assert tried.isdisjoint(idiom.name for p in load() for idiom in p.traced if "silu" in idiom.ops)
    for pattern in load():
        for idiom in pattern.traced:
            assert idiom.op in idiom.ops, f"{pattern.name}: {idiom.name}"


def test_ops_that_cannot_be_read_cost_no_other_idiom(monkeypatch):
    def failing(_nodes):
        raise TypeError("an op of nobody's")

    monkeypatch.setattr(idioms, "ops_of", failing)
    assert raised(check(norm, randn(3, D), randn(D)), rms_norm) == 1
