# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings by tables of cosines and sines, as Hugging Face's models spell them, are one
semantic op; what no pass takes is what Inductor would have compiled without us."""

from __future__ import annotations

import pytest
import torch
from checking import check, check_gradients, raised, randn, reasons
from passes import codes
from torch._inductor.utils import run_and_get_code

from coda_inductor.semantic.rotary import rotate, rotate_definition

B, T, H, D = 2, 5, 3, 8


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate_every_two(x):
    first, second = x[:, :, :, ::2], x[:, :, :, 1::2]
    return torch.stack((-second, first), dim=-1).flatten(-2)


def llama(x, cos, sin):
    x = x.transpose(1, 2)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def cohere(x, cos, sin):
    wide = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    y = wide * cos.unsqueeze(1) + rotate_every_two(wide) * sin.unsqueeze(1)
    return y.to(x.dtype)


def gptj(x, cos, sin):
    return x * cos.unsqueeze(2) + rotate_every_two(x) * sin.unsqueeze(2)


def partial(turn):
    def function(x, cos, sin):
        x, width = x.transpose(1, 2), cos.shape[-1]
        part, rest = x[..., :width], x[..., width:]
        turned = part * cos.unsqueeze(1) + turn(part) * sin.unsqueeze(1)
        return torch.cat([turned, rest], dim=-1)

    return function


neox, glm = partial(rotate_half), partial(rotate_every_two)


SPELLINGS = {
    "llama": (llama, D),
    "cohere": (cohere, D),
    "gptj": (gptj, D),
    "neox": (neox, D // 2),
    "glm": (glm, D // 2),
    "phi3": (neox, D),  # no column is left
}


def tables(width, rows=(1, T), dtype=torch.float64):
    """No rotations: what holds is to hold whatever they are."""
    return randn(*rows, width, dtype=dtype), randn(*rows, width, dtype=dtype)


@pytest.mark.parametrize("rows", [(1, T), (B, T)], ids=["shared", "own"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fires_and_agrees(spelling, rows):
    function, width = SPELLINGS[spelling]
    x = randn(B, T, H, D).requires_grad_()
    harness = check_gradients(function, x, *tables(width, rows))
    assert raised(harness, rotate) == 1
    left = {getattr(n.target, "__name__", n.target) for n in harness.raised.nodes}
    assert ("cat" in left) == (spelling == "phi3")  # which Inductor takes out
    assert not {"stack", "neg", "mul", "sub"} & left


@pytest.mark.parametrize("spelling", ["gptj", "phi3"])
def test_unfused_it_is_inductors_own_kernel(spelling):
    """Strides too: a caller may look at them."""
    function, width = SPELLINGS[spelling]
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


def test_learned_tables_are_left_alone():
    harness = check_gradients(llama, randn(B, T, H, D), *(t.requires_grad_() for t in tables(D)))
    assert raised(harness, rotate) == 0
    assert "turns-gradient" in codes(harness)


def test_tables_of_another_width_are_left_alone():
    harness = check(llama, randn(B, T, H, D), *tables(1))
    assert raised(harness, rotate) == 0
    assert "rotary-width" in codes(harness)


def test_a_result_of_another_shape_is_left_alone():
    harness = check(llama, randn(1, T, H, D), *tables(D, (B, T)))
    assert raised(harness, rotate) == 0
    assert "rotary-shape" in codes(harness)


def test_unequal_parts_are_left_alone():
    def uneven(x, cos, sin):
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin

    harness = check(uneven, randn(B, T, H, D), *tables(D, (T, 1)))
    assert raised(harness, rotate) == 0
    assert "rotary-width" in codes(harness)


def test_another_sign_is_another_op():
    def back(x, cos, sin):
        first, second = x[..., : D // 2], x[..., D // 2 :]
        return x * cos + torch.cat((second, -first), -1) * sin

    harness = check(back, randn(B, T, H, D), *tables(D, (T, 1)))
    assert raised(harness, rotate) == 0


def test_what_is_used_elsewhere_stays():
    def both(x, cos, sin):
        turned = rotate_half(x)
        return x * cos + turned * sin, turned

    harness = check(both, randn(B, T, H, D), *tables(D, (T, 1)))
    assert raised(harness, rotate) == 0
    assert "used elsewhere" in reasons(harness)


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
