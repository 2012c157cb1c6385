# SPDX-License-Identifier: Apache-2.0
"""Rotations: their gradients, and what Inductor makes of those that no pass takes."""

from __future__ import annotations

import pytest
import torch
from checking import randn
from test_rotary_spelling import WHOLE, B, D, H, T, torchtitan
from torch._inductor.utils import run_and_get_code

from coda_inductor.semantic.rotary import rotate, rotate_definition, rotate_pairs


def tables(width, rows=(1, T), dtype=torch.float64):
    """No rotations: what holds is to hold whatever they are."""
    return randn(*rows, width, dtype=dtype), randn(*rows, width, dtype=dtype)


def test_unfused_it_is_inductors_own_kernel():
    """Strides too: a caller may look at them."""
    function, width = WHOLE["phi3"]
    given = randn(B, T, H, D), *tables(width)
    kernels, results = [], []
    for backend in ("coda", "inductor"):
        torch._dynamo.reset()
        result, (code,) = run_and_get_code(torch.compile(function, backend=backend), *given)
        results.append(result)
        kernels.append(code.count("async_compile.cpp_pybinding("))
    assert kernels[0] == kernels[1] > 0
    # Inductor lays out a cat with nothing as its other part, eager does not: either will do.
    assert results[0].stride() in (results[1].stride(), function(*given).stride())


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("width", "distance", "joined"), [(8, 4, False), (8, 1, False),
                         (8, 2, False), (4, 2, True), (4, 1, True), (8, 4, True)])  # fmt: skip
def test_gradient_is_the_transposed_map(width, distance, joined, paired, inverse):
    width = width // 2 if paired else width
    x, (cos, sin) = randn(T, H, D).requires_grad_(), tables(width, (T, 1))
    run = lambda x: rotate(x, cos, sin, distance, paired, inverse, joined, x.dtype)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x,))
    dy = randn(T, H, D)
    back = rotate(dy, cos, sin, distance, paired, not inverse, joined, x.dtype)
    torch.testing.assert_close((back * x).sum(-1), (dy * run(x)).sum(-1))


def test_a_rotation_back_that_two_kernels_read_is_not_stored():
    """Two operands of GEMMs are made of queries' gradients, as of a deferred norm's projections."""

    def operands(dy, cos, sin, rstd):
        dz = rotate_definition(dy, cos, sin, D // 2, False, True, False, dy.dtype)
        dz = dz.transpose(1, 2).reshape(-1, H * D)
        return torch.cat([dz, rstd], 1), torch.cat([dz * rstd, rstd], 1)

    rows = torch.randn(1, 1, 2 * T, D)
    given = (torch.randn(1, H, 2 * T, D), rows, rows, torch.randn(2 * T, 1))
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(operands), *given)
    assert code.count("empty_strided_cpu((") == 2
    torch.testing.assert_close(got, operands(*given))


def test_gradient_of_complex_turns_is_the_rotation_back():
    angles = randn(T, 1, D // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    x = randn(T, H, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_pairs(x, turns, x.dtype), (x,))
    back = rotate_pairs(rotate_pairs(x, turns, x.dtype), turns.conj(), x.dtype)
    torch.testing.assert_close(back, x)


def test_complex_numbers_through_inductor():
    """Which has no code for them."""
    given = [t.float() for t in (randn(B, T, H, D), *tables(D // 2, (T,)))]
    ours, (code,) = run_and_get_code(torch.compile(torchtitan, backend="coda"), *given)
    torch.testing.assert_close(ours, torchtitan(*given))
    assert "view_as_complex" not in code
    assert "aten.mul" not in code
