# SPDX-License-Identifier: Apache-2.0
"""The halves of a product are found in whatever way they are taken out of it, and share a tile."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, randn
from torch import nn

D, H = 16, 24


def unfolded(z):
    return z.view(*z.shape[:-1], 2, H)


def selected(z):
    both = z.reshape(*z.shape[:-1], 2, -1)
    return both.select(-2, 0), both.select(-2, 1)


def indexed(z):
    both = unfolded(z)
    return both[..., 0, :], both[..., 1, :]


CUTS = {
    "unbind": lambda z: unfolded(z).unbind(-2),
    "unflatten": lambda z: torch.unbind(z.unflatten(-1, (2, -1)), dim=2),
    "index": indexed,
    "select": selected,
    "slices": lambda z: (z[..., :H], z[:, :, H:]),
    "slices from the end": lambda z: (z[..., :-H], z[..., -H:]),
    "narrow": lambda z: (z.narrow(2, 0, H), z.narrow(-1, H, H)),
    "tensor_split": lambda z: z.tensor_split(2, -1),
    "tensor_split at": lambda z: torch.tensor_split(z, (H,), dim=-1),
}


def packed(cut, gate=lambda g, u: F.silu(g) * u):
    def function(x, w, gamma, gate_up, down):
        x = x + F.linear(x, w)
        z = F.linear(F.rms_norm(x, (D,), gamma, 1e-2), gate_up)
        return x + F.linear(gate(*cut(z)), down)

    shapes = ((D, D), (D,), (2 * H, D), (D, H))
    return Weights(function, *(randn(*shape) for shape in shapes))


def pairs(harness) -> int:
    return sum(site.program.paired for site in harness.fused)


def joined(harness) -> int:
    """How often the raised graph divides by ``chunk``."""
    return sum(node.target is torch.chunk for node in harness.raised.nodes)


@pytest.mark.parametrize("cut", CUTS)
def test_halves_meet_and_their_gradient_is_put_together(cut):
    harness = check_gradients(packed(CUTS[cut]), randn(2, 5, D).requires_grad_())
    assert pairs(harness) == harness.counts["swiglu"] == harness.counts["swiglu_backward"] == 1
    filled = ("slice_scatter", "select_scatter", "constant_pad", "slice_backward")
    assert not [op for op in harness.ops() if any(name in op for name in filled)]
    assert len(harness.report.sites) == gemms_of_chunks()


@functools.cache
def gemms_of_chunks() -> int:
    x = randn(2, 5, D).requires_grad_()
    return len(check_gradients(packed(lambda z: z.chunk(2, -1)), x).report.sites)


@pytest.mark.parametrize("gate", [F.glu, lambda z: F.glu(z, 2), nn.GLU()], ids=["", "dim", "nn"])
def test_gated_linear_units_share_a_tile(gate):
    function = packed(lambda z: (z,), gate)
    assert pairs(check(function, randn(2, 5, D))) == 1
    assert pairs(check_gradients(function, randn(2, 5, D).requires_grad_())) == 1


def test_gated_linear_units_of_an_exported_program():
    x, function = randn(2, 5, D), packed(lambda z: (z,), F.glu)
    program = torch.export.export(function, (x,)).module()
    assert pairs(check(program, x)) == 1


def test_more_readers_of_one_half():
    def cut(z):
        low, high = z[..., :H], z[..., H:]
        return low + z[..., :H].sin(), high

    assert joined(check_gradients(packed(cut), randn(2, 5, D).requires_grad_())) == 1


def glu_of_rows(x, w):
    return F.glu(F.linear(x, w), dim=1)


def one_half(x, w):
    return F.linear(x, w)[..., :H].sin()


def interleaved(x, w):
    z = F.linear(x, w)
    return F.silu(z[..., ::2]) * z[..., 1::2]


def as_in_gpt_oss(x, w):
    z = F.linear(x, w)
    gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def in_rows(x, w):
    low, high = F.linear(x, w).unflatten(1, (2, 3)).unbind(1)
    return F.silu(low) * high


def of_no_product(x, w):
    low, high = x[..., : D // 2], x[..., D // 2 :]
    return F.linear(F.silu(low) * high, w[:, : D // 2])


def overlapping(x, w):
    z = F.linear(x, w)
    return F.silu(z[..., :H]) * z[..., H - 1 : -1]


def returned(x, w):
    z = F.linear(x, w)
    return z[..., :H], z[..., H:].sin()


def changed(x, w):
    z = F.linear(x, w)
    low, high = z[..., :H], z[..., H:]
    low.mul_(2)
    return F.silu(low) * high


def changed_between(x, w):
    z = F.linear(x, w)
    low = z[..., :H] * 3
    z[..., H:] += 1
    return low * z[..., H:]


def in_two_modes(x, w):
    z = F.linear(x, w)
    low = z[..., :H]
    with torch.no_grad():
        high = z[..., H:]
    return F.silu(low) * high


OTHERS = [
    glu_of_rows, one_half, interleaved, as_in_gpt_oss, in_rows, of_no_product, overlapping,
    returned, changed, changed_between, in_two_modes,
]  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_what_else_is_taken_stays(function):
    harness = check_gradients(function, randn(2, 6, D).requires_grad_(), randn(2 * H, D))
    assert joined(harness) == 0
