# SPDX-License-Identifier: Apache-2.0
"""Norms in other people's spellings: roots as powers and as quotients, both statistics in one
call."""

from __future__ import annotations

import pytest
import torch
from checking import check_gradients, raised, randn

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
