# SPDX-License-Identifier: Apache-2.0
"""The backward pass of RMSNorm between GEMMs: eager's gradients in float64, or a reason.

Every case trains everything; ``FROZEN`` leaves out a parameter or the input. ``custom op`` keeps
the fused calls, whose partials then have several tiles; ``expanded`` runs them as plain aten.
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
    differentiate,
    leave_custom_ops,
    randn,
)
from harness import Harness
from passes import codes

D, HIDDEN, WIDE = 16, 24, 80  # WIDE: a head, wider than all else
EPS = 1e-2  # large beside mean(x^2), so that an eps in the wrong place shows


def norm(x, w, gamma):
    return F.rms_norm(F.linear(x, w), (D,), gamma, EPS)


def by_hand(x, w, gamma):
    h = F.linear(x, w)
    return (1 + gamma) * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))


def shared_weight(x, w, gamma, a, b):
    n = norm(x, w, gamma)
    return F.linear(n, a).sin() + F.linear(n, b) + F.linear(n, a + 0).cos() * F.linear(n, a)


def product_read_twice(x, w, gamma, a):
    z = F.linear(norm(x, w, gamma), a)
    return z.sin() * z.cumsum(0), z


def residual(x, w, gamma, a):
    stream = x + F.linear(x, w)
    return stream + F.linear(F.rms_norm(stream, (D,), gamma, EPS), a).sin()


def two_norms_of_one_stream(x, w, gamma, a, b):
    stream = x + F.linear(x, w)
    first, second = (F.rms_norm(stream, (D,), g, EPS) for g in (gamma, gamma * 2))
    return F.linear(first, a) * F.linear(second, b)


def parallel_branches(x, w, gamma, up, down, a):
    stream = x + F.linear(x, w)
    n = F.rms_norm(stream, (D,), gamma, EPS)
    return stream + F.linear(F.linear(n, a).cumsum(1), a) + F.linear(F.gelu(F.linear(n, up)), down)


def behind(function):
    """Of a norm and of more weights."""
    return lambda x, w, gamma, *weights: function(norm(x, w, gamma), *weights)


def gated(activation):
    def function(x, w, gamma, gate, up, down):
        n = norm(x, w, gamma)
        return F.linear(activation(F.linear(n, gate)) * F.linear(n, up), down)

    return function


def packed(x, w, gamma, gate_up, down):
    gate, up = F.linear(norm(x, w, gamma), gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


SQUARE, UP, DOWN = (D, D), (HIDDEN, D), (D, HIDDEN)
MLP, GATED = (UP, (HIDDEN,), DOWN), (UP, UP, DOWN)

# name: (function, shapes of its weights behind w and gamma, norms in it)
CASES = {
    "one GEMM": (behind(F.linear), (UP,), 1),
    "written by hand, 1 + gamma": (lambda x, w, g, a: F.linear(by_hand(x, w, g), a), (UP,), 1),
    "no weight": (lambda x, w, g, a: F.linear(norm(x, w, None), a) * g[0], (UP,), 1),
    "two GEMMs": (behind(lambda n, a, b: F.linear(n, a).sin() * F.linear(n, b)), (UP, UP), 1),
    "three GEMMs": (
        behind(lambda n, a, b, c: F.linear(n, a).softmax(-1) * F.linear(n, b) + F.linear(n, c)),
        (UP, UP, UP), 1,
    ),
    "one with a bias, one without": (
        behind(lambda n, a, bias, b: F.linear(n, a, bias) * F.linear(n, b).tanh()),
        (UP, (HIDDEN,), UP), 1,
    ),
    "shared weight": (shared_weight, (UP, UP), 1),
    "product read twice": (product_read_twice, (UP,), 1),
    "head wider than 4 d": (behind(F.linear), ((WIDE, D),), 1),
    "residual": (residual, (SQUARE,), 1),
    "two norms of one stream": (two_norms_of_one_stream, (UP, UP), 2),
    "parallel branches": (parallel_branches, (UP, DOWN, SQUARE), 1),
    "SwiGLU": (gated(F.silu), GATED, 1),
    "GeGLU": (gated(F.gelu), GATED, 1),
    "packed gate and up": (packed, ((2 * HIDDEN, D), DOWN), 1),
    "GELU": (behind(lambda n, up, bias, d: F.linear(F.gelu(F.linear(n, up, bias)), d)), MLP, 1),
    "LoRA": (
        behind(lambda n, frozen, a, b: F.linear(n, frozen) + F.linear(F.linear(n, a), b)),
        (UP, (4, D), (HIDDEN, 4)), 1,
    ),
}  # fmt: skip


def case(name: str) -> tuple[Weights, torch.Tensor, int]:
    """The function with weights, an input (2, 5, D) that wants a gradient, the number of norms."""
    function, shapes, norms = CASES[name]
    weights = [randn(*shape) / shape[-1] ** 0.5 for shape in (SQUARE, (D,), *shapes)]
    weights[1] = randn(D)
    return Weights(function, *weights), randn(2, 5, D).requires_grad_(), norms


#: Those that are tried with the op itself too, whose partials have several tiles.
TILED = ["shared weight", "head wider than 4 d", "residual", "SwiGLU", "GELU", "packed gate and up"]


@pytest.mark.parametrize(
    ("name", "custom"), [*((name, False) for name in CASES), *((name, True) for name in TILED)]
)
def test_gradients_are_eagers(name, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    function, x, norms = case(name)
    harness = check_gradients(function, x)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == norms
    assert harness.report.near_misses == []
    # What is left of a norm are vectors: rstd, made of partials.
    assert harness.ops()["aten.rsqrt.default"] == norms
    assert not any("rms_norm" in name for name in harness.ops())


# What is frozen, by name of the parameter -> (weights of column partials, GEMMs of the graph).
# Forward: first, gate, up, down. Backward: a weight gradient for each of these that is trained, and
# the gradients of the activation, of n (one GEMM for two) and of x, as far as anything needs them.
FROZEN = {
    (): (1, 4 + 4 + 3),
    ("gamma",): (0, 4 + 4 + 3),
    ("gate",): (1, 4 + 3 + 3),
    ("x",): (1, 4 + 4 + 2),
    ("x", "w"): (1, 4 + 3 + 2),
    ("x", "w", "gamma"): (0, 4 + 3 + 1),
    ("w", "gamma", "gate", "up", "down"): (0, 4 + 0 + 3),
    ("x", "w", "gamma", "gate", "up"): (0, 4 + 1 + 0),
    ("x", "gamma", "gate", "up", "down"): (0, 4 + 1 + 2),
}


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_parameters_cost_nothing(frozen, monkeypatch):
    leave_custom_ops(monkeypatch)
    function, x, _ = case("SwiGLU")
    leaves = dict(zip(("w", "gamma", "gate", "up", "down"), function.weights, strict=True), x=x)
    for name in frozen:
        leaves[name].requires_grad_(False)
    harness = check_gradients(function, x)
    columns, gemms = FROZEN[frozen]
    assert harness.counts["rms_norm"] == 1
    assert sum(r.axis == "col" for s in harness.fused for r in s.program.reduces) == columns
    # Gate and up share a call, and so do their two gradients of n; the latter are one GEMM.
    assert len(harness.report.sites) == gemms - 1


def test_the_scale_alone_does_not_count(monkeypatch):
    """Nothing in front of the norm is trained: dz is scaled for the weight, and that is all."""
    leave_custom_ops(monkeypatch)

    def function(x, w, gamma, a, b):
        return F.linear(F.silu(F.linear(norm(x, w, gamma), a)), b)

    shapes = ((D, D), (D,), (HIDDEN, D), (D, HIDDEN))
    weights = Weights(function, *(randn(*shape) for shape in shapes))
    for frozen in weights.weights[:2]:
        frozen.requires_grad_(False)
    harness = check_gradients(weights, randn(2, 5, D))
    assert harness.counts["rms_norm"] == 1
    assert harness.counts["rms_norm_backward"] == 0


@pytest.mark.parametrize(("name", "early"), [
    ("GELU", False), ("SwiGLU", True), ("packed gate and up", True), ("shared weight", False),
    ("head wider than 4 d", False),
])  # fmt: skip
def test_where_the_row_dot_is_taken(name, early, monkeypatch):
    """Partials of rowsum(dz * z) come with the activation's gradient, if z is at hand; a bias hides
    it. Reading 80 columns of a wide head's z costs more than another pass over 16 of dx: it is not
    kept for the backward pass."""
    leave_custom_ops(monkeypatch)
    function, x, _ = case(name)
    harness = check_gradients(function, x)
    wide = [s for s in harness.fused if s.shape[1] == HIDDEN]
    assert any(r.axis == "row" for s in wide for r in s.program.reduces) == early
    assert WIDE not in [n.meta["val"].shape[-1] for n in harness.saved]


class Own(torch.autograd.Function):
    """Its first input. Both get gradients, of which the first changes sign if ``reverse``."""

    @staticmethod
    def forward(ctx, x, other, reverse):
        ctx.reverse = reverse
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient if ctx.reverse else gradient, gradient, None


REFUSALS = {
    "reversed gradient": (
        lambda x, w, g, a: F.linear(Own.apply(norm(x, w, g), x.detach(), True), a), "norm-gradient",
    ),
    "gradient for another": (
        lambda x, w, g, a: F.linear(Own.apply(norm(x, w, g), x.sin(), False), a), "norm-gradient",
    ),
    "also elementwise": (
        behind(lambda n, a: F.linear(n, a).sum(-1, keepdim=True) * n), "norm-read-elsewhere",
    ),
    "behind a mask": (
        lambda x, w, g, a: F.linear(norm(x, w, g) * (x > 0), a), "norm-read-elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_norm_keeps_eagers_gradients(name):
    function, code = REFUSALS[name]
    weights = Weights(function, randn(D, D), randn(D), randn(HIDDEN, D))
    harness = check_gradients(weights, randn(2, 5, D).requires_grad_())
    assert code in codes(harness)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == 0


def test_a_norm_whose_gradient_is_disabled_stays():
    """Its gradient is rewritten with it or not at all."""
    function, x, _ = case("SwiGLU")
    harness = check_gradients(function, x, disable=["rms_norm_backward"])
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == 0
    assert "disabled" in codes(harness)
    assert check(function, x.detach(), disable=["rms_norm_backward"]).counts["rms_norm"] == 1


def test_float16_needs_the_option():
    function, x, _ = case("one GEMM")
    args = copy.deepcopy(function).half(), x.detach().half().requires_grad_()
    harness = check_gradients(*args)
    assert harness.counts["rms_norm"] == 0
    assert "float16-overflow" in codes(harness)
    assert check_gradients(*args, fp16_norms=True).counts["rms_norm_backward"] == 1


def test_bfloat16_gradients_are_no_less_accurate_than_eagers():
    def swiglu(x, w, gamma, gate, up, down):
        n = F.rms_norm(F.linear(x, w), (128,), gamma, EPS)
        return F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)

    # Large enough that errors are those of many roundings, not of a few.
    shapes = ((128, 128), (128,), (192, 128), (192, 128), (128, 192))
    weights = [randn(*s) / (s[-1] ** 0.5 if len(s) == 2 else 1) for s in shapes]
    half, x = Weights(swiglu, *weights).bfloat16(), randn(256, 128).bfloat16()
    exact, rounded = copy.deepcopy(half).double(), copy.deepcopy(half)
    leaves = [t.requires_grad_() for t in (x.double(), x.clone(), x.clone())]
    gradients = [
        differentiate(model(leaf), (model, (leaf,)))
        for model, leaf in ((exact, leaves[0]), (rounded, leaves[1]))
    ]
    harness = Harness()
    gradients.append(differentiate(harness.train(half, leaves[2]), (half, (leaves[2],))))
    assert harness.counts["rms_norm_backward"] == 1
    for want, eager, ours in zip(*gradients, strict=True):
        assert (ours.double() - want).norm() < 1.2 * (eager.double() - want).norm()
