# SPDX-License-Identifier: Apache-2.0
"""RMSNorms between GEMMs, forward and backward (R1 to R4): the same function, and no norm's result
is stored. ``TILED`` cases leave the op itself, whose partials have tiles."""

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import SideBySide, Weights, check, check_gradients, leave_custom_ops, randn
from passes import codes

D, HIDDEN, WIDE = 16, 24, 80  # WIDE: a head, wider than all else
EPS = 1e-2  # large beside mean(x^2), so that an eps in the wrong place shows


def norm(x, w, gamma):
    return F.rms_norm(F.linear(x, w), (D,), gamma, EPS)


def residual(x, w, gamma, a):
    x = x + F.linear(x, w)
    return x + F.linear(F.rms_norm(x, (D,), gamma, EPS), a).sin()


def two_norms_of_one_stream(x, w, gamma, a, b):
    x = x + F.linear(x, w)
    first, second = (F.rms_norm(x, (D,), g, EPS) for g in (gamma, gamma * 2))
    return F.linear(first, a) * F.linear(second, b)


def scaled_rows(x, w, gamma, gate, a):
    """A gate of one value a row, whose product is newer than the one that it scales."""
    y = F.linear(x, w)
    return F.linear(F.rms_norm(x + F.linear(x, gate).sigmoid() * y, (D,), gamma, EPS), a)


def behind(function):
    return lambda x, w, gamma, *weights: function(norm(x, w, gamma), *weights)


def gated(activation):
    return behind(lambda n, g, u, d: F.linear(activation(F.linear(n, g)) * F.linear(n, u), d))


def slices(n, a):
    z = F.linear(n, a)
    return z[..., :D].cumsum(1).sum(-1) + z[..., D:].cumsum(0).sum(-1)


def packed(x, w, gamma, gate_up, down):
    gate, up = F.linear(norm(x, w, gamma), gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


SQUARE, UP, DOWN = (D, D), (HIDDEN, D), (D, HIDDEN)
MLP, GATED = (UP, (HIDDEN,), DOWN), (UP, UP, DOWN)

# name: (function, shapes of its weights behind w and gamma, norms in it)
CASES = {
    "one GEMM": (behind(F.linear), (UP,), 1),
    "shared weight": (
        behind(lambda n, a, b: (
            F.linear(n, a).sin() + F.linear(n, b) + F.linear(n, a + 0).cos() * F.linear(n, a)
        )),
        (UP, UP), 1,
    ),
    "product read twice": (
        behind(lambda n, a: ((z := F.linear(n, a)).sin() * z.cumsum(0), z)), (UP,), 1,
    ),
    "head wider than 4 d": (behind(F.linear), ((WIDE, D),), 1),
    "slices": (behind(slices), ((WIDE, D),), 1),
    "residual": (residual, (SQUARE,), 1),
    "scaled rows": (scaled_rows, ((1, D), UP), 1),
    "two norms of one stream": (two_norms_of_one_stream, (UP, UP), 2),
    "SwiGLU": (gated(F.silu), GATED, 1),
    "packed gate and up": (packed, ((2 * HIDDEN, D), DOWN), 1),
    "GELU": (behind(lambda n, up, bias, d: F.linear(F.gelu(F.linear(n, up, bias)), d)), MLP, 1),
}  # fmt: skip
TILED = ["shared weight", "residual", "packed gate and up"]


def case(name: str) -> tuple[Weights, torch.Tensor, int]:
    """The function with weights, an input (2, 5, D) that wants a gradient, the number of norms."""
    function, shapes, norms = CASES[name]
    shapes = SQUARE, (D,), *shapes
    weights = [randn(*s) / (s[-1] ** 0.5 if len(s) == 2 else 1) for s in shapes]
    return Weights(function, *weights), randn(2, 5, D).requires_grad_(), norms


def cases(names) -> tuple[SideBySide, tuple[torch.Tensor, ...], int]:
    """All of them in one graph."""
    models, inputs, norms = zip(*map(case, names), strict=True)
    return SideBySide(models), inputs, sum(norms)


@pytest.mark.parametrize("custom", [False, True])
def test_gradients_are_eagers(custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    models, inputs, norms = cases(TILED if custom else CASES)
    harness = check_gradients(models, *inputs)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == norms
    assert harness.report.near_misses == []
    # What is left of a norm are vectors: rstd, made of partials.
    assert harness.ops()["aten.rsqrt.default"] == norms
    assert not any("rms_norm" in name for name in harness.ops())


# What is frozen, by name of the parameter -> weights of column partials.
FROZEN = {(): 1, ("gamma",): 0, ("x", "w", "gamma"): 0, ("w", "gamma", "gate", "up", "down"): 0}


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_parameters_cost_nothing(frozen, monkeypatch):
    leave_custom_ops(monkeypatch)
    function, x, _ = case("SwiGLU")
    leaves = dict(zip(("w", "gamma", "gate", "up", "down"), function.weights, strict=True), x=x)
    for name in frozen:
        leaves[name].requires_grad_(False)
    harness = check_gradients(function, x)
    # Nothing in front of the norm is trained: dz is scaled for the weight, which does not count.
    assert harness.counts["rms_norm_backward"] == (not {"x", "w", "gamma"} <= {*frozen})
    columns = [r for s in harness.fused for r in s.program.reduces if r.axis == "col"]
    assert len(columns) == FROZEN[frozen]


@pytest.mark.parametrize(("name", "early"), [
    ("GELU", False), ("packed gate and up", True), ("head wider than 4 d", False),
    ("slices", False),
])  # fmt: skip
def test_where_the_row_dot_is_taken(name, early, monkeypatch):
    """Partials of rowsum(dz * z) come with the activation's gradient, if z is at hand; a bias hides
    it. A wide head's z is not kept for that, nor is its gradient (or one of slices) copied to be
    scaled: 2 GiB of Llama's."""
    leave_custom_ops(monkeypatch)
    function, x, _ = case(name)
    harness = check_gradients(function, x)
    wide = [s for s in harness.fused if s.shape[1] == HIDDEN]
    assert any(r.axis == "row" for s in wide for r in s.program.reduces) == early
    assert WIDE not in [n.meta["val"].shape[-1] for n in harness.saved]
    products = [n for n in harness.parts[1].nodes if n.target is torch.ops.aten.mul.Tensor]
    assert products
    assert not any(n.meta["val"].shape[-1] == WIDE for n in products)


def test_the_gemm_in_front_is_found_however_deep_the_stream_is():
    """A regression: with the residual on the right (GPT-2 writes it so), the search went through
    the whole stream first, gave up, and from the fifth layer on took an older GEMM for it."""

    def deep(x, first, *layers):
        x = F.linear(x, first)
        for v, o, up, down in zip(*[iter(layers)] * 4, strict=True):
            x = F.linear(F.linear(F.rms_norm(x, (D,), None, EPS), v).cumsum(1), o) + x
            x = F.linear(F.gelu(F.linear(F.rms_norm(x, (D,), None, EPS), up)), down) + x
        return x

    layers = 6
    weights = [randn(*s) / s[-1] ** 0.5 for s in (SQUARE, *[SQUARE, SQUARE, UP, DOWN] * layers)]
    assert check(Weights(deep, *weights), randn(2, 5, D)).counts["rms_norm"] == 2 * layers


def test_norm_moves_past_addmm_with_alpha_and_beta():
    function = behind(lambda n, a, bias: torch.addmm(bias, n, a.t(), alpha=0.5, beta=-3))
    shapes = (4, D), SQUARE, (D,), UP, (HIDDEN,)
    assert check(function, *(randn(*s) for s in shapes)).counts == {"rms_norm": 1}


def test_float16_needs_the_option():
    function, x, _ = case("one GEMM")
    args = copy.deepcopy(function).half(), x.detach().half().requires_grad_()
    harness = check_gradients(*args)
    assert harness.counts["rms_norm"] == 0
    assert "float16-overflow" in codes(harness)
    assert check_gradients(*args, fp16_norms=True).counts["rms_norm_backward"] == 1


BETWEEN = (lambda h, other: F.silu(h) * other, lambda h, other: other + F.gelu(h))


def test_one_token_without_a_dimension_of_tokens():
    """Gamma's gradient is summed over rows, of which there are none."""

    def norm(x, w):
        return F.rms_norm(x, x.shape, w, 1e-6)

    def function(x, first, gate, up, second, down, y, w, b, gamma, out):
        z = norm(x, first)
        mlps = [norm(f(z @ gate, z @ up), second) @ down for f in BETWEEN]
        return *mlps, F.linear(norm(y + F.linear(y, w, b), gamma), out, b)

    shapes = (8,), (8,), (8, 2), (8, 2), (2,), (2, 4)
    shapes += (40,), (40, 40), (40,), (40,), (40, 40)  # torch has other ops for smaller ones
    check_gradients(function, *(randn(*shape).requires_grad_() for shape in shapes))
