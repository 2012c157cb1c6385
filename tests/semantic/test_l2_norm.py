# SPDX-License-Identifier: Apache-2.0
"""Norms that are rows over their bounded length (lucidrains' RMSNorm): read, deferred, and their
gradients with rows below the floor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, Weights, assert_same, check, check_gradients, raised, randn, reasons
from torch import nn

from coda_inductor.semantic import l2_norm, rms_norm

D, H, LAYERS = 16, 24, 3


def length(x):
    return x.norm(dim=-1, keepdim=True)


#: Functions of x (..., D) and w (D,).
SPELLINGS = {
    "scale, weight": lambda x, w: F.normalize(x, dim=-1) * D**0.5 * w,
    "weight, scale": lambda x, w: w * F.normalize(x, dim=2) * D**0.5,
    "scaled weight": lambda x, w: F.normalize(x, dim=-1, eps=3.0) * (D**0.5 * w),
    "one plus": lambda x, w: F.normalize(x, dim=-1) * D**0.5 * (w + 1),
    "clamp_min": lambda x, w: x / length(x).clamp_min(1e-8) * 4 * w,
    "clamp": lambda x, w: x / torch.clamp(torch.norm(x, dim=-1, keepdim=True), min=4.0) * w,
    "a share": lambda x, w: (
        w * (x / (torch.norm(x, dim=-1, keepdim=True) * D**-0.5).clamp(min=1.0))
    ),
    "vector_norm": lambda x, w: (
        x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(1e-8, None) * w
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    def function(x, w, b):
        return SPELLINGS[name](x, w) + b

    args = (randn(*shape).requires_grad_() for shape in ((4, 6, D), (D,), (D,)))
    harness = check_gradients(function, *args)
    assert raised(harness, l2_norm) == 1
    (op,) = (n for n in harness.raised.nodes if n.target is l2_norm)
    assert op.args[1] is not None, "the weight is part of it"


def test_without_weight_or_scale():
    harness = check_gradients(lambda x: F.normalize(x, dim=-1) + 1, randn(4, D).requires_grad_())
    (op,) = (n for n in harness.raised.nodes if n.target is l2_norm)
    assert op.args[1:4] == (None, 1.0, 1e-12)
    assert "l2_norm at l2_norm: add" in reasons(harness)


class Layer(nn.Module):
    """A gated MLP behind a norm whose floor is among the lengths of its rows."""

    def __init__(self, floor):
        super().__init__()
        self.floor, self.g = floor, nn.Parameter(randn(1, 1, D))
        self.up, self.down = nn.Parameter(randn(2 * H, D) / 4), nn.Parameter(randn(D, H) / 5)

    def forward(self, x):
        n = x / length(x).clamp_min(self.floor) * D**0.5 * self.g
        gate, up = F.linear(n, self.up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Stack(nn.Module):
    def __init__(self, floor=4.0):
        super().__init__()
        self.first = nn.Parameter(randn(D, D) / 4)
        self.layers = nn.ModuleList(Layer(floor) for _ in range(LAYERS))

    def forward(self, x):
        x = x + F.linear(x, self.first)
        for layer in self.layers:
            x = layer(x)
        return x


def rows_of_all_lengths():
    """Some below the floor of a ``Stack``, some above, one zero."""
    x = randn(2, 5, D) * torch.tensor([1e-3, 0.2, 1.0, 3.0, 0.0], dtype=torch.float64)[:, None]
    return x.requires_grad_()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_norm_of_each_layer_waits(dynamic):
    x = rows_of_all_lengths()
    assert check(Stack(), x.detach(), dynamic=dynamic).counts["l2_norm"] == LAYERS
    harness = check_gradients(Stack(), x, dynamic=dynamic)
    assert harness.counts["l2_norm"] == harness.counts["l2_norm_backward"] == LAYERS
    assert harness.counts["swiglu_backward"] == LAYERS
    assert not [op for op in harness.ops() if "l2_norm" in op]


def test_what_the_floor_holds_has_another_gradient():
    """The test above would pass without rows on both sides."""
    x = rows_of_all_lengths()
    found = []
    for floor in (4.0, 1e-12):
        torch.manual_seed(0)
        x.grad = None
        stack = Stack(floor)
        stack(x).square().sum().backward()
        found.append(x.grad)
    below = (found[0] - found[1]).abs().amax(-1) > 1e-6
    assert below.any()
    assert not below.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_less_precision(dtype):
    model, x = Stack().to(dtype), rows_of_all_lengths().detach().to(dtype)
    check_gradients(model, x.requires_grad_(), tolerance=2 * TOLERANCE[dtype], reference=True)


def test_its_kernels_are_those_of_an_rms_norm():
    """They are tested and measured on GPUs under that name."""

    def block(norm):
        def function(x, w, g, wq):
            x = x + F.linear(x, w)
            return x, F.linear(norm(x, g), wq)

        model = Weights(function, *(randn(*shape) for shape in ((D, D), (D,), (D, D))))
        harness = check_gradients(model, rows_of_all_lengths())
        return harness.counts, [site.program.key for site in harness.fused]

    counts, keys = block(lambda x, g: F.normalize(x, dim=-1, eps=4.0) * D**0.5 * g)
    assert counts["l2_norm"] == counts["l2_norm_backward"] == 1
    assert len(keys) >= 3
    assert keys == block(lambda x, g: F.rms_norm(x, (D,), g, 1e-6))[1]


def test_products_that_no_gemm_makes_the_gradient_of():
    def function(x, w, g, wq, wk):
        x = x + F.linear(x, w)
        n = F.normalize(x, dim=-1, eps=4.0) * D**0.5 * g
        return x, F.linear(n, wq), F.linear(n, wk, g[: D // 2])

    shapes = ((D, D), (D,), (D, D), (D // 2, D))
    model = Weights(function, *(randn(*shape) for shape in shapes))
    harness = check_gradients(model, rows_of_all_lengths())
    assert harness.counts["l2_norm"] == harness.counts["l2_norm_backward"] == 1


def disabled(name):
    return check_gradients(Stack(), rows_of_all_lengths(), disable=[name])


@pytest.mark.parametrize("name", ["l2_norm", "l2_norm_backward"])
def test_disabled_it_counts_zero(name):
    assert disabled(name).counts["l2_norm"] == 0


#: name -> (function of x and w, shape of w, the reason or None where nothing even looks alike)
OTHERS = {
    "of columns": (lambda x, w: F.normalize(x, dim=1) * w, (D,), None),
    "of order 1": (lambda x, w: F.normalize(x, p=1.0, dim=-1) * w, (D,), None),
    "from above": (lambda x, w: x / length(x).clamp(max=1.0) * w, (D,), None),
    "from both sides": (lambda x, w: x / length(x).clamp(0.1, 9.0) * w, (D,), None),
    "of another": (lambda x, w: x / length(x.sin()).clamp_min(0.1) * w, (D,), None),
    "a floor that is a tensor": (
        lambda x, w: x / length(x).clamp_min(w.abs().max()), (D,), "eps is not a constant",
    ),
    "a negative share": (
        lambda x, w: x / (length(x) * -1.0).clamp_min(0.5) * w, (D,), "share of the norm",
    ),
    "its length is read": (
        lambda x, w: (x / (n := length(x).clamp_min(0.1)) * w, n), (D,), "is used elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_stays(name):
    function, shape, reason = OTHERS[name]
    harness = check_gradients(function, randn(4, 6, D).requires_grad_(), randn(*shape))
    assert raised(harness, l2_norm) == raised(harness, rms_norm) == 0
    assert reason in reasons(harness) if reason else reasons(harness) == ""


@pytest.mark.parametrize("shape", [(6, 1), (4, 1, D), (4, 6, D)], ids=str)
def test_a_weight_of_another_shape_is_none(shape):
    def function(x, w):
        return F.normalize(x, dim=-1) * w

    harness = check_gradients(function, randn(4, 6, D).requires_grad_(), randn(*shape))
    assert "the first is not one value a column" in reasons(harness)
    (op,) = (n for n in harness.raised.nodes if n.target is l2_norm)
    assert op.args[1] is None


def test_two_weights_are_one_and_a_factor():
    def function(x, w, v):
        return F.normalize(x, dim=-1) * w * v

    harness = check_gradients(function, randn(4, 6, D).requires_grad_(), randn(D), randn(D))
    assert raised(harness, l2_norm) == 1
    assert "two tensors are multiplied with it" in reasons(harness)


@pytest.mark.parametrize("weight", [None, (D,)], ids=["bare", "weight"])
def test_the_ops_gradient_is_its_derivative(weight):
    x = rows_of_all_lengths().detach()[0, :4].requires_grad_()
    w = None if weight is None else randn(*weight).requires_grad_()
    given = [t for t in (x, w) if t is not None]

    def ours(*tensors):
        return l2_norm(tensors[0], tensors[1] if w is not None else None, 4.0, 4.0, x.dtype)[0]

    def theirs(*tensors):
        y = F.normalize(tensors[0], dim=-1, eps=4.0) * 4.0
        return y if w is None else y * tensors[1]

    pairs = [torch.autograd.grad(f(*given).sin().sum(), given) for f in (ours, theirs)]
    assert_same(*pairs)
