# SPDX-License-Identifier: Apache-2.0
"""The backward pass needs the old value of an input that is written to: it is kept."""

import pytest
import torch
from harness import Harness
from zoo.written import ALL, D, N, step

import coda_inductor


def assert_as_eager(name, compile_):
    for have, want in zip(step(name, compile_), step(name, lambda model: model), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-5 if name == "cast" else 1e-9)


@pytest.mark.parametrize("options", [{}, {"memory": 0.0}], ids=["", "nothing is kept"])
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_eagers(name, options):
    harness = Harness(gate="always", **options)
    assert_as_eager(name, lambda model: torch.compile(model, backend=harness))


def test_the_same_by_inductor():
    options = {"gate": "always", "memory": 0.0}
    assert_as_eager("slices", lambda m: torch.compile(m, backend="coda", options=options))


def test_the_same_in_inductors_own_passes():
    with coda_inductor.enabled(gate="always"):
        assert_as_eager("center", torch.compile)


def test_what_is_kept_is_small():
    """The product's operand in the dtype in which it is read, and no copy of the buffer; nothing
    at all of a buffer that the backward pass does not read."""

    def function(x, state, steps):
        y = x @ state.bfloat16()
        with torch.no_grad():
            state.mul_(0.5)
            steps.add_(1)
        return y

    harness = Harness(gate="always")
    x = torch.randn(N, D, dtype=torch.bfloat16, requires_grad=True)
    harness.train(function, x, torch.randn(D, D), torch.zeros(1)).sum().backward()
    assert harness.saved_bytes() == D * D * 2


def test_an_input_that_the_caller_sees_change():
    """AOTAutograd writes to it when the forward pass has ended, so that autograd sees it."""

    def function(x, p):
        whole = torch.cat([x[:8], x[8:]]) * p
        x += whole.view(N, D)
        return whole

    def gradients(f):
        numbers = torch.linspace(0, 1, N * D, dtype=torch.float64).view(N, D)
        leaf, p = (numbers.clone().requires_grad_() for _ in range(2))
        x = leaf * 1.0
        y = f(x, p)
        (y.sin().sum() + x.cos().sum()).backward()
        return [y, leaf.grad, p.grad]

    have = gradients(torch.compile(function, backend=Harness()))
    torch.testing.assert_close(have, gradients(function), rtol=1e-10, atol=1e-10)
