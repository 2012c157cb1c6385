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
EPS = 1e-5


def hugging_face(x, w):
    h = x.to(torch.float32)
    variance = h.pow(2).mean(-1, keepdim=True)
    h = h * torch.rsqrt(variance + EPS)
    return w * h.to(x.dtype)


def no_casts(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def float_method(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * w


def functional(x, w):
    return F.rms_norm(x, (D,), w, EPS)


def gemma(x, w):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + w.float())).type_as(x)


def bare(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def bare_with_eps(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def functional_without_weight(x, w):
    return F.rms_norm(x, (D,), eps=EPS)


def behind_a_full_scale(x, w):
    return no_casts(x, w) * x.sin()  # the weight is w, not the tile behind it


SPELLINGS = [
    hugging_face, no_casts, float_method, functional, gemma, bare, functional_without_weight,
    behind_a_full_scale,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling_of_rms_norm_raises_once(spelling, dtype):
    x, w = randn(2, 3, D, dtype=dtype), randn(D, dtype=dtype)
    harness = check(spelling, x, w)
    assert raised(harness, rms_norm) == 1
    assert not any("rsqrt" in str(n.target) or "pow" in str(n.target) for n in harness.raised.nodes)


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
    harness = check(hugging_face, x, w, tolerance=TOLERANCE[torch.bfloat16])
    (op,) = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert op.args[3] == torch.float32


def test_narrowing_cast_of_the_input_stays():
    def function(x, w):
        return no_casts(x.bfloat16(), w)

    x, w = randn(2, 3, D, dtype=torch.float32), randn(D, dtype=torch.bfloat16)
    harness = check(function, x, w)
    (op,) = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert op.args[0].meta["example_value"].dtype == torch.bfloat16


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


def norm_over(dim, keepdim=True):
    return lambda x, w: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=keepdim) + EPS) * w


def intermediate_is_returned(x, w):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return w * (x * rstd), rstd


# name -> (function of x and w, shape of w, the reason or None where nothing even looks alike)
NOT_RMS_NORM = {
    "other dim": (norm_over(1), (D,), None),
    "two dims": (norm_over((1, 2)), (D,), None),
    "no keepdim": (norm_over(-1, keepdim=False), (D,), None),
    "other exponent": (lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, True) + EPS), (D,), None),
    "scaled eps": (
        lambda x, w: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), EPS, alpha=3)), (D,), None,
    ),
    "statistics of another tensor": (
        lambda x, w: x * torch.rsqrt(x.sin().pow(2).mean(-1, True) + EPS), (D,), None,
    ),
    "intermediate": (intermediate_is_returned, (D,), "its intermediate rstd is used elsewhere"),
    "eps is a tensor": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, True) + w.abs().max()), (D,),
        "eps is not a constant",
    ),
    "two dims normalized": (lambda x, w: F.rms_norm(x, (D, D), None, EPS), (D,), None),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_RMS_NORM)
def test_what_is_not_rms_norm_stays(name):
    function, shape, reason = NOT_RMS_NORM[name]
    harness = check(function, randn(D, D, D), randn(*shape))
    assert raised(harness, rms_norm) == 0
    assert reason in reasons(harness) if reason else reasons(harness) == ""


@pytest.mark.parametrize("shape", [(1,), (3, D), (3, 1)], ids=str)
def test_weight_of_another_shape_is_no_weight(shape):
    # The normalization itself still is one; what multiplies it stays in the graph.
    harness = check(no_casts, randn(3, D), randn(*shape))
    assert "the weight is not one value a column" in reasons(harness)
    (op,) = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert op.args[1] is None


def test_symbolic_eps_is_a_constant_that_is_guarded():
    # A float that changed between calls: Dynamo makes it an input.
    harness = check(bare_with_eps, randn(3, D), 1e-3, dynamic=True)
    assert raised(harness, rms_norm) == 1
    compiled = torch.compile(bare_with_eps, backend=harness, dynamic=True)
    with torch.no_grad():
        for eps in (1e-3, 0.5, 0.25, 0.5):
            for rows in (3, 4):
                x = randn(rows, D)
                assert_same(compiled(x, eps), bare_with_eps(x, eps))
    assert harness.graphs == 1 + 3  # one for each eps, serving every number of rows


def test_changing_the_eps_of_a_trained_norm():
    class Norm(torch.nn.Module):
        eps = 1e-3

        def forward(self, x):
            return bare_with_eps(x, self.eps)

    norm, harness = Norm(), Harness()
    compiled = torch.compile(norm, backend=harness, dynamic=True)
    graphs = []
    for norm.eps in (1e-3, 0.5):
        for rows in (3, 4):
            x = randn(rows, D).requires_grad_()
            gradients = [torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (compiled, norm)]
            assert_same(*gradients)
            graphs.append(harness.graphs)
        assert raised(harness, rms_norm) == 1
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3]


@pytest.mark.parametrize("up", [(D,), (1, D), (3, 1)], ids=str)
def test_broadcast_gate_is_refused(up):
    harness = check(SWIGLUS["silu first"], randn(3, D), randn(*up))
    assert raised(harness, swiglu) == 0
    assert "differ in shape" in reasons(harness)


def test_gate_in_higher_precision_is_refused():
    def function(g, u):
        return F.silu(g.float()) * u

    harness = check(function, randn(3, D, dtype=torch.bfloat16), randn(3, D, dtype=torch.bfloat16))
    assert raised(harness, swiglu) == 0
    assert "another dtype" in reasons(harness)


def test_gate_that_is_widened_to_meet_a_wide_up_is_refused():
    def function(g, u):
        return F.silu(g.float()) * u

    harness = check(function, randn(3, D, dtype=torch.bfloat16), randn(3, D, dtype=torch.float32))
    assert raised(harness, swiglu) == 0
    assert "in another dtype than its input's" in reasons(harness)


def test_idioms_whose_ops_a_graph_lacks_are_not_tried(monkeypatch):
    """Of a norm alone, nothing but norms' idioms; and what a pattern raises may be another's."""
    tried = set()
    match = Idiom.match

    def noted(self, root):
        tried.add(self.name)
        return match(self, root)

    monkeypatch.setattr(Idiom, "match", noted)
    harness = check(no_casts, randn(3, D), randn(D))
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
    assert raised(check(no_casts, randn(3, D), randn(D)), rms_norm) == 1
