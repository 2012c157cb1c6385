# SPDX-License-Identifier: Apache-2.0
"""Layers of low rank that read one input are one."""

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, randn
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo import shared_inputs
from coda_inductor.graph.read import op_name
from coda_inductor.matching import bodies

ROWS, K = 48, 32


@pytest.fixture(autouse=True)
def few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(shared_inputs, "LEAST", ROWS)


def both(x, a, b):
    return F.linear(x, a).sin() + F.linear(x, b).cos().sum(-1, keepdim=True)


def three(x, a, b, c):
    return both(x, a, b) * F.linear(x, c).tanh().mean()


def of_two_inputs(x, a, b):
    y = x.sin()
    return both(x, a, b) + both(y, a, b)


def with_autocast(x, a, b):
    with torch.autocast("cpu", torch.bfloat16):
        return both(x, a, b).float()


def under_two_modes(x, a, b, c):
    y = F.linear(x, b).sum() + F.linear(x, c).sum()
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, a).float() * y


def written_between(x, a, b):
    y = x.sin()
    first = F.linear(y, a)
    y.mul_(2)
    return first * F.linear(y, b).mean()


def graded_apart(x, a, b):
    with torch.no_grad():
        first = F.linear(x, a)
    return first * F.linear(x, b).mean()


TWO, ONE = ((2, K), (2, K)), 1
CASES = {
    "two": (both, TWO, ONE),
    "three": (three, ((2, K), (1, K), (1, K)), ONE),
    "in a checkpoint": (lambda *a: checkpoint(both, *a, use_reentrant=False), TWO, ONE),
    "of two inputs": (of_two_inputs, TWO, 2),
    "biases": (
        lambda x, a, b: F.linear(x, a, b[:, 0]) + F.linear(x, b, a[:, 0]), TWO, 2,
    ),
    "of made weights": (lambda x, a, b: both(x, a * 1.5, b), TWO, 2),
    "returned": (lambda x, a, b: (F.linear(x, a), F.linear(x, b).sin()), TWO, 2),
    "a view is returned": (lambda x, a, b: (F.linear(x, a)[:2], F.linear(x, b).sin()), TWO, 2),
    "changed in place": (lambda x, a, b: F.linear(x, a).sin_() + F.linear(x, b), TWO, 2),
    "a mode between": (graded_apart, TWO, 2),
    "one too wide": (both, ((5, K), (1, K)), 2),
    "too wide together": (both, ((3, K), (2, K)), 2),
}  # fmt: skip


def linears(harness):
    return [
        node for body in bodies(harness.raised) for node in body.graph.nodes
        if op_name(node) == "linear"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in CASES), ("three", True), ("returned", True)]
)
def test_what_becomes_one_layer(name, dynamic):
    function, shapes, left = CASES[name]
    x = randn(2, ROWS // 2, K).requires_grad_()
    model = Weights(function, *(randn(*shape) / K**0.5 for shape in shapes))
    harness = check_gradients(model, x, dynamic=dynamic)
    assert len(linears(harness)) == left


@pytest.mark.parametrize(("function", "left"), [(with_autocast, 1), (under_two_modes, 2)])
def test_dtypes_do_not_mix(function, left):
    weights = (randn(2, K).float() for _ in range(2 if left == 1 else 3))
    x = randn(ROWS, K).float().requires_grad_()
    harness = check_gradients(Weights(function, *weights), x, tolerance=3e-2)
    assert len(linears(harness)) == left


def test_what_changes_between_them():
    harness = check(Weights(written_between, randn(2, K), randn(2, K)), randn(ROWS, K))
    assert len(linears(harness)) == 2


@pytest.mark.parametrize(
    ("rows", "options"),
    [(ROWS, {"disable": ["shared_inputs"]}), (ROWS - 1, {})],
)
def test_layers_that_stay_their_own(rows, options):
    """Of few rows nothing is saved."""
    model = Weights(both, randn(2, K), randn(2, K))
    harness = check_gradients(model, randn(rows, K).requires_grad_(), **options)
    assert len(linears(harness)) == 2
