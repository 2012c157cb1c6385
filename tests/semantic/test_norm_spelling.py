# SPDX-License-Identifier: Apache-2.0
"""Norms in other people's spellings: roots as powers and as quotients, means as sums, weights
before the root, both statistics in one call; and the functions that look like these."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check_gradients, raised, randn, reasons

from coda_inductor.matching import normalize
from coda_inductor.semantic import layer_norm, rms_norm

D, EPS = 16, 1e-6


def mean_square(x):
    return x.pow(2).mean(-1, keepdim=True) + EPS


#: A root as the author of the norm wrote it.
ROOTS = {
    "pow": lambda x: torch.pow(mean_square(x), -0.5),
    "power": lambda x: mean_square(x) ** -0.5,
    "one over": lambda x: 1.0 / torch.sqrt(mean_square(x)),
    "one over a power": lambda x: torch.div(1, mean_square(x).pow(0.5)),
    "reciprocal": lambda x: torch.reciprocal(mean_square(x).sqrt()),
    "to the minus one": lambda x: mean_square(x).sqrt() ** -1,
}


def inputs():
    return tuple(randn(*shape).requires_grad_() for shape in ((4, 6, D), (D,), (D,)))


@pytest.mark.parametrize("name", ROOTS)
def test_roots_of_rms_norm(name):
    harness = check_gradients(lambda x, w, b: x * ROOTS[name](x) * w + b, *inputs())
    assert raised(harness, rms_norm) == 1


@pytest.mark.parametrize("name", ["over a power", "over"])
def test_quotients(name):
    root = {
        "over a power": lambda x: mean_square(x) ** 0.5,
        "over": lambda x: mean_square(x).sqrt(),
    }
    harness = check_gradients(lambda x, w, b: x / root[name](x) * w + b, *inputs())
    assert raised(harness, rms_norm) == 1


def test_both_statistics_of_layer_norm():
    def function(x, w, b):
        variance, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + EPS) * w + b

    assert raised(check_gradients(function, *inputs()), layer_norm) == 1


@pytest.mark.parametrize(
    "root",
    [
        lambda x: 2.0 / torch.sqrt(mean_square(x)),
        lambda x: mean_square(x) ** -0.25,
        lambda x: 1.0 / torch.sqrt(mean_square(x)).sqrt(),
        lambda x: torch.pow(2.0, mean_square(x)),
        lambda x: torch.var_mean(x, -1, unbiased=True, keepdim=True)[0] ** -0.5,
        lambda x: torch.var_mean(x, -1, unbiased=False, keepdim=True)[1],
        lambda x: torch.div(1, mean_square(x).sqrt(), rounding_mode="floor").clamp(0.1),
    ],
)
def test_other_functions_are_other_ops(root):
    harness = check_gradients(lambda x, w, b: x * root(x) * w + b, *inputs())
    assert raised(harness, rms_norm) == raised(harness, layer_norm) == 0


#: A row's mean square, (4, 6, 1), as the author of the norm wrote it.
MEANS = {
    "sum over width": lambda x: x.pow(2).sum(-1, keepdim=True) / D,
    "sum over size": lambda x: torch.sum(x * x, dim=-1, keepdim=True).div(x.size(-1)),
    "sum times share": lambda x: x.square().sum(dim=(-1,), keepdim=True) * D**-1,
    "share times sum": lambda x: (1 / D) * x.square().sum(2, True),
    "unsqueezed": lambda x: torch.mean(x * x, dim=-1).unsqueeze(-1),
    "unsqueezed sum": lambda x: x.square().sum(-1).unsqueeze(2) / D,
    "sum over width, unsqueezed": lambda x: (x.square().sum(-1) / D).unsqueeze(dim=-1),
    "indexed": lambda x: (x**2).mean(dim=-1)[..., None],
    "named": lambda x: torch.mean(input=x.square(), dim=[-1], keepdim=True),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_of_rms_norm(name):
    mean = MEANS[name]
    harness = check_gradients(lambda x, w, b: x * torch.rsqrt(mean(x) + EPS) * w + b, *inputs())
    assert raised(harness, rms_norm) == 1


@pytest.mark.parametrize("name", ["sum over width", "unsqueezed"])
def test_means_of_layer_norm(name):
    def function(x, w, b):
        c = x - x.sum(-1, keepdim=True) / D
        return w * c * torch.rsqrt(MEANS[name](c) + EPS) + b

    assert raised(check_gradients(function, *inputs()), layer_norm) == 1


def rstd(x):
    return torch.rsqrt(mean_square(x))


#: x normalized and weighted, in an order of its author.
PRODUCTS = {
    "weight first": lambda x, w: w * x * rstd(x),
    "weight second": lambda x, w: x * w * rstd(x),
    "root first": lambda x, w: rstd(x) * (x * w),
    "root and weight": lambda x, w: x * (rstd(x) * w),
    "weight and root": lambda x, w: w * rstd(x) * x,
    "over the root": lambda x, w: w * x / mean_square(x).sqrt(),
    "over the root, weight second": lambda x, w: torch.div(x * w, torch.sqrt(mean_square(x))),
    "root without a dimension": lambda x, w: (
        w * x * torch.rsqrt(x.square().mean(-1) + EPS).unsqueeze(-1)
    ),
    "over a root without one": lambda x, w: w * (x / (x.square().mean(-1) + EPS).sqrt()[..., None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_orders_of_rms_norm(name):
    def function(x, w, b):
        return PRODUCTS[name](x, w) + b

    harness = check_gradients(function, *inputs())
    assert raised(harness, rms_norm) == 1
    (norm,) = (n for n in harness.raised.nodes if n.target is rms_norm)
    assert norm.args[1] is not None, "the weight is part of it"


@pytest.mark.parametrize("lead", [(1,), (1, 1)], ids=str)
def test_weights_with_leading_dimensions_of_one(lead):
    """Megatron's and lucidrains' shapes; the gradient has the weight's own."""
    x, residual, w = randn(4, 6, D).requires_grad_(), randn(D, D), randn(*lead, D).requires_grad_()
    up = randn(2 * D, D)

    def rms(x, residual, w, up):
        x = x @ residual
        return F.linear(x * rstd(x) * w, up)

    def rms_of_one_plus(x, residual, w, up):
        x = x @ residual
        return F.linear(x * rstd(x) * (1 + w), up)

    def layer(x, residual, w, up):
        c = x - x.mean(-1, keepdim=True)
        return F.linear(w * c * torch.rsqrt(c.square().mean(-1, keepdim=True) + EPS) + w, up)

    for function, op in ((rms, rms_norm), (rms_of_one_plus, rms_norm), (layer, layer_norm)):
        harness = check_gradients(function, x, residual, w, up)
        (norm,) = (n for n in harness.raised.nodes if n.target is op)
        assert norm.args[1].meta["example_value"].shape == (D,)
        assert harness.counts["rms_norm"] == (op is rms_norm)


@pytest.mark.parametrize("shape", [(4, 1, D), (1, 6, D), (1, 6, 1), (1, 1)], ids=str)
def test_weights_that_vary_by_row_are_none(shape):
    def function(x, w):
        return x * rstd(x) * w

    harness = check_gradients(function, randn(4, 6, D).requires_grad_(), randn(*shape))
    (norm,) = (n for n in harness.raised.nodes if n.target is rms_norm)
    assert norm.args[1] is None
    assert "the weight is not one value a column" in reasons(harness)


@pytest.mark.parametrize("eps", [(), (1,)], ids=["0-d", "1-d"])
def test_an_eps_that_is_a_tensor_is_not_read(eps):
    """A buffer may hold another value when the graph runs."""

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("eps", torch.full(eps, EPS, dtype=torch.float64))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    harness = check_gradients(Norm(), randn(4, 6, D).requires_grad_())
    assert raised(harness, rms_norm) == 0
    assert {r.code for r in harness.report.refusals} == {"not-constant"}
    assert "eps is not a constant: it is a tensor" in reasons(harness)


@pytest.mark.parametrize("over", [True, False])
def test_orders_of_layer_norm(over):
    """PyTorch's tutorial, and fairseq's."""

    def function(x, w, b):
        c, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (
            w * c / torch.sqrt(variance + EPS) if over else w * c * torch.rsqrt(variance + EPS)
        ) + b

    harness = check_gradients(function, *inputs())
    (norm,) = (n for n in harness.raised.nodes if n.target is layer_norm)
    assert None not in norm.args[1:3]


def without_a_dimension(x):
    return x.square().mean(-1)


#: Functions of x (6, 6), w (6,).
OTHERS = {
    "sum": lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) * w,
    "sum over another width": lambda x, w: (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) / (x.shape[-1] + 1) + EPS) * w
    ),
    "sum times width": lambda x, w: (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) * x.shape[-1] + EPS) * w
    ),
    "width over sum": lambda x, w: x * torch.sqrt(x.shape[-1] / x.square().sum(-1, True)) * w,
    "sum of columns": lambda x, w: (
        x * torch.rsqrt(x.square().sum(-2, keepdim=True) / x.shape[-1] + EPS) * w
    ),
    "columns' roots": lambda x, w: x * torch.rsqrt(without_a_dimension(x) + EPS) * w,
    "unsqueezed in front": lambda x, w: (
        x * torch.rsqrt(without_a_dimension(x).unsqueeze(0) + EPS) * w
    ),
    "unsqueezed twice": lambda x, w: (
        x * torch.rsqrt(without_a_dimension(x).unsqueeze(-1).unsqueeze(0) + EPS) * w
    ),
    "of the weighted": lambda x, w: (
        x * w * torch.rsqrt((x * w).sin().square().mean(-1, True) + EPS)
    ),
    "of the weight": lambda x, w: w * x * torch.rsqrt(w.square().mean(-1, keepdim=True) + EPS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_a_norm_stays(name):
    harness = check_gradients(OTHERS[name], randn(6, 6).requires_grad_(), randn(6).requires_grad_())
    assert raised(harness, rms_norm) == 0


#: Functions that people take for norms: their eps is added to the root, or to the deviation.
LOOKALIKES = {
    "root": lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + EPS) * w,
    "norm": lambda x, w: w * (x / (x.norm(2, dim=-1, keepdim=True) * D**-0.5 + EPS)),
    "deviation": lambda x, w: w * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + EPS),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_stay(name):
    leaves = randn(4, 6, D).requires_grad_(), randn(D).requires_grad_()
    harness = check_gradients(LOOKALIKES[name], *leaves)
    assert raised(harness, rms_norm) == raised(harness, layer_norm) == 0


@pytest.mark.parametrize("body", ["x.sum(0)", "x.norm(1.0, 0)", "x.std(0)", "x.unsqueeze(0)"])
def test_reductions_over_other_dimensions_are_read_as_written(body):
    """A user's idiom may have one."""
    graph = torch.fx.symbolic_trace(eval(f"lambda x: {body}", {"F": F})).graph  # noqa: S307
    (node,) = (n for n in graph.nodes if n.op.startswith("call"))
    canon = normalize(node)
    assert canon is not None
    assert canon.args == node.args
