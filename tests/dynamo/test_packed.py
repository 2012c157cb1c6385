# SPDX-License-Identifier: Apache-2.0
"""A packed gate and up projection: read as two products that meet in one tile, in whatever way the
halves are taken out of it, or left as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, leave_custom_ops, randn
from harness import Harness
from passes import codes
from torch import nn

from coda_inductor.plan import Plan
from coda_inductor.refusal import refuse

D, H = 16, 24


def unfolded(z):
    return z.view(*z.shape[:-1], 2, H)


def indexed(z):
    both = unfolded(z)
    return both[..., 0, :], both[..., 1, :]


CUTS = {
    "chunk": lambda z: z.chunk(2, -1),
    "unbind": lambda z: unfolded(z).unbind(-2),
    "index": indexed,
    "slices": lambda z: (z[..., :H], z[:, :, H:]),
}


def mlp(cut, gate=lambda g, u: F.silu(g) * u, bias=False):
    def function(x, w, gamma, gate_up, b, down):
        x = x + F.linear(x, w)
        z = F.linear(F.rms_norm(x, (D,), gamma, 1e-2), gate_up, b if bias else None)
        return x + F.linear(gate(*cut(z)), down)

    shapes = ((D, D), (D,), (2 * H, D), (2 * H,), (D, H))
    return Weights(function, *(randn(*shape) for shape in shapes))


def pairs(harness) -> int:
    return sum(site.program.paired for site in harness.fused)


def divided(harness) -> set[int]:
    """Of how many dimensions what ``chunk`` divides is: a weight has 2, the product 3."""
    chunks = [node.args[0] for node in harness.raised.nodes if node.target is torch.chunk]
    return {node.meta["example_value"].dim() for node in chunks}


@pytest.mark.parametrize(("cut", "bias"), [*((cut, False) for cut in CUTS), ("chunk", True)])
def test_gradients_are_eagers(cut, bias):
    """The gradient's parts are made in down's dgrad; nothing joins them."""
    harness = check_gradients(mlp(CUTS[cut], bias=bias), randn(2, 5, D).requires_grad_())
    for name in ("rms_norm", "swiglu"):
        assert harness.counts[name] == harness.counts[f"{name}_backward"] == 1
    assert pairs(harness) == 1
    joined = [n for n in harness.graph.nodes if n.target is torch.ops.aten.cat.default]
    weight, row = (2 * H, D), (2 * H,)
    assert {tuple(n.meta["val"].shape) for n in joined} == ({weight, row} if bias else {weight})


def test_a_frozen_weight():
    function = mlp(CUTS["chunk"]).requires_grad_(False)
    assert pairs(check_gradients(function, randn(2, 5, D).requires_grad_())) == 1


def test_no_tokens_of_a_symbolic_batch():
    """A view may have one -1, but not beside a 0."""
    compiled = torch.compile(mlp(CUTS["chunk"]), backend=Harness())
    x = randn(3, 0, D)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        assert compiled(x).shape == (3, 0, D)


@pytest.mark.parametrize("gate", [F.glu, lambda z: F.glu(z, 2), nn.GLU()], ids=["", "dim", "nn"])
def test_gated_linear_units_share_a_tile(gate):
    function = mlp(lambda z: (z,), gate)
    assert pairs(check_gradients(function, randn(2, 5, D).requires_grad_())) == 1


def read_elsewhere(x, w):
    z = F.linear(x, w)
    return F.silu(z[..., :H]) * z[..., H:] + z.mean()


def never_meeting(x, w):
    z = F.linear(x, w)
    return z[..., :H].softmax(-1), z[..., H:].cumsum(0)


def not_k_major(x, w):
    z = F.linear(x, w.reshape(D, 2 * H).t())
    return F.silu(z[..., :H]) * z[..., H:]


def test_in_fp8_halves_would_have_other_scales():
    harness = check(mlp(CUTS["slices"]), randn(2, 5, D), fp8="rowwise")
    assert not divided(harness)
    assert pairs(harness) == 0


def test_refused_with_the_gates_reason(monkeypatch):
    why = refuse("split-copies-gradient", "too few rows")
    monkeypatch.setattr(Plan, "split_loses", lambda *_: why)
    harness = check(mlp(CUTS["chunk"]), randn(2, 5, D))
    assert pairs(harness) == 0
    assert "split-copies-gradient" in codes(harness)


def test_partials_of_pairs_with_rows(monkeypatch):
    """The op's own implementation reads a row vector of 2N: every value twice."""
    leave_custom_ops(monkeypatch, "64x32:1x1:co")
    harness = check(mlp(CUTS["chunk"], bias=True), randn(2, 5, D))
    (pair,) = [s.program for s in harness.fused if s.program.paired]
    assert [o.kind for o in pair.operands] == ["col", "row", "row"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_halves_that_are_no_floats_are_no_failure(dtype):
    """Strict: what warns would raise."""

    def function(x, w):
        gate, up = F.linear(x, w).chunk(2, -1)
        return gate * up

    harness = check(function, torch.ones(5, D, dtype=dtype), torch.ones(2 * H, D, dtype=dtype))
    assert not harness.fused


def as_in_gpt_oss(x, w):
    z = F.linear(x, w)
    gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


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


def rows_of_a_view(x, w):
    z = F.linear(x, w).view(-1, 2 * H)
    return F.silu(z[:, :H]) * z[:, H:]


def rows_beside_halves(x, w):
    low, high, *_ = F.linear(x, w).unflatten(-1, (2, H)).unbind(1)
    return F.silu(low) * high


OTHERS = [
    read_elsewhere, never_meeting, not_k_major, lambda x, w: F.glu(F.linear(x, w), dim=1),
    as_in_gpt_oss, returned, changed, changed_between, in_two_modes,
    rows_of_a_view, rows_beside_halves,
]  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_what_else_is_taken_stays(function):
    harness = check_gradients(function, randn(2, 6, D).requires_grad_(), randn(2 * H, D))
    assert not divided(harness)
    assert not any(site.program.paired for site in harness.fused)
