# SPDX-License-Identifier: Apache-2.0
"""In-place ops on tensors that nothing else shares are read as plain ones; others stay in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, raised, randn, swiglu

from coda_inductor.matching import mutates
from coda_inductor.semantic import rms_norm

D, EPS = 16, 1e-6


def changes(harness):
    return [n for n in harness.raised.nodes if mutates(n)]


def inputs():
    return tuple(randn(*shape).requires_grad_() for shape in ((4, D), (D, D), (D,)))


def root(x, w, v):
    return x * x.pow(2).mean(-1, keepdim=True).add_(EPS).rsqrt_() * v


def statement(x, w, v):
    mean = x.pow(2).mean(-1, keepdim=True)
    mean += EPS
    return x * mean.rsqrt() * v


def residual(x, w, v):
    y = F.linear(x, w)
    y.add_(x)
    return root(y, w, v) + y


def augmented(x, w, v):
    y = x @ w
    y += x
    y *= 2
    return root(y, w, v)


NORMS = (root, statement, residual, augmented)


@pytest.mark.parametrize("function", NORMS, ids=lambda f: f.__name__)
def test_a_norm_behind_them_is_recognized(function):
    harness = check_gradients(function, *inputs())
    assert raised(harness, rms_norm) == 1
    assert not changes(harness)


@pytest.mark.parametrize(
    "gate",
    [
        lambda x, w, v: F.silu(x @ w).mul_(x @ w.t()),
        lambda x, w, v: F.silu(x @ w, inplace=True) * (x @ w.t()),
        lambda x, w, v: F.silu(x @ w, True) * (x @ w.t()),
    ],
)
def test_a_gate(gate):
    harness = check_gradients(gate, *inputs())
    assert raised(harness, swiglu) == 1
    assert not changes(harness)


def of_an_input(x, w, v):
    return x.add_(1) @ w


def of_a_view(x, w, v):
    y = x @ w
    y.view(-1).mul_(2)
    return y


def behind_a_view(x, w, v):
    y = x @ w
    first = y[0]
    y.mul_(2)
    return y, first


def behind_itself(x, w, v):
    y = (x @ w).contiguous()
    z = y.reshape(4, D)
    y.add_(1)
    return y * z


def that_narrows(x, w, v):
    y = x.float()
    y.add_(x @ w)
    return y


def without_gradients(x, w, v):
    y = x @ w
    with torch.no_grad():
        y.mul_(2)
    return y * v


OTHERS = (
    of_an_input, of_a_view, behind_a_view, behind_itself, that_narrows, without_gradients,
)  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_what_something_else_sees_stays(function):
    """The values, those of the arguments too, are eager's."""
    given = (t.detach() for t in inputs()) if function is of_an_input else inputs()
    run = check if function is of_an_input else check_gradients
    harness = run(function, *given, tolerance=1e-6 if function is that_narrows else None)
    assert len(changes(harness)) >= 1


def test_read_before_and_behind():
    def function(x):
        y = x * 2
        before = y.sin()
        y.add_(1)
        return before + y, y

    harness = check(function, randn(4, D))
    assert not changes(harness)
