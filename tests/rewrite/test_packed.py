# SPDX-License-Identifier: Apache-2.0
"""A packed gate and up projection: read as two products that meet in one tile, or left as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, leave_custom_ops, randn
from harness import Harness
from passes import codes

from coda_inductor.refusal import refuse
from coda_inductor.select.policy import Policy

D, HIDDEN = 16, 24

CUTS = {
    "chunk": lambda z: z.chunk(2, -1),
    "split": lambda z: z.split([HIDDEN, HIDDEN], -1),
    "slices": lambda z: (z[..., :HIDDEN], z[..., HIDDEN:]),
    "narrow": lambda z: (z.narrow(-1, 0, HIDDEN), z.narrow(-1, HIDDEN, HIDDEN)),
}
GATES = {
    "SwiGLU": lambda g, u: F.silu(g) * u,
    "GeGLU": lambda g, u: F.gelu(g) * u,
    "ReGLU, gate last": lambda u, g: u * F.relu(g),
}


def mlp(cut, gate, bias):
    def function(x, w, gamma, gate_up, b, down):
        x = x + F.linear(x, w)
        z = F.linear(F.rms_norm(x, (D,), gamma, 1e-2), gate_up, b if bias else None)
        return x + F.linear(gate(*cut(z)), down)

    shapes = ((D, D), (D,), (2 * HIDDEN, D), (2 * HIDDEN,), (D, HIDDEN))
    return Weights(function, *(randn(*shape) for shape in shapes))


def pairs(harness) -> int:
    return sum(site.program.paired for site in harness.fused)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("cut", CUTS)
def test_halves_meet_in_one_tile(cut, gate, bias):
    harness = check(mlp(CUTS[cut], GATES[gate], bias), randn(2, 5, D))
    assert harness.counts["rms_norm"] == 1
    assert pairs(harness) == 1
    assert len(harness.report.sites) == 3  # w, gate and up, down


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("cut", ["chunk", "slices"])
def test_gradients_are_eagers(cut, dynamic, bias):
    function = mlp(CUTS[cut], GATES["SwiGLU"], bias)
    harness = check_gradients(function, randn(2, 5, D).requires_grad_(), dynamic=dynamic)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == 1
    assert harness.counts["swiglu"] == pairs(harness) == 1
    if cut == "chunk":  # the gradient's parts are made in down's dgrad; nothing joins them
        assert harness.counts["swiglu_backward"] == 1
        joined = [n for n in harness.graph.nodes if n.target is torch.ops.aten.cat.default]
        weight, row = (2 * HIDDEN, D), (1, 2 * HIDDEN)
        assert {tuple(n.meta["val"].shape) for n in joined} == ({weight, row} if bias else {weight})


def test_no_tokens_of_a_symbolic_batch():
    """A view may have one -1, but not beside a 0."""
    compiled = torch.compile(mlp(CUTS["chunk"], GATES["SwiGLU"], False), backend=Harness())
    x = randn(3, 0, D)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        assert compiled(x).shape == (3, 0, D)


def read_elsewhere(x, w):
    z = F.linear(x, w)
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up, z


def never_meeting(x, w):
    gate, up = F.linear(x, w).chunk(2, -1)
    return gate.softmax(-1), up.cumsum(0)


def three_parts(x, w):
    q, k, v = F.linear(x, w).split([HIDDEN, HIDDEN // 2, HIDDEN // 2], -1)
    return q.sin(), k * v


def uneven(x, w):
    z = F.linear(x, w)
    return F.silu(z[..., : HIDDEN - 2]) * z[..., HIDDEN + 2 :]


def overlapping(x, w):
    z = F.linear(x, w)
    return F.silu(z[..., :HIDDEN]) * z[..., 1 : HIDDEN + 1]


def by_rows(x, w):
    gate, up = F.linear(x, w).chunk(2, 0)
    return F.silu(gate) * up


OTHERS = [read_elsewhere, never_meeting, three_parts, uneven, overlapping, by_rows]


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_other_products_stay_one(function):
    harness = check(function, randn(2, 5, D), randn(2 * HIDDEN, D))
    assert len(harness.report.sites) == 1


def test_weight_that_is_not_k_major_stays_one():
    def function(x, w):
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    assert len(check(function, randn(2, 5, D), randn(D, 2 * HIDDEN)).report.sites) == 1


def test_refused_with_the_gates_reason(monkeypatch):
    why = refuse("split-copies-gradient", "too few rows")
    monkeypatch.setattr(Policy, "split_loses", lambda *_: why)
    harness = check(mlp(CUTS["chunk"], GATES["SwiGLU"], False), randn(2, 5, D))
    assert pairs(harness) == 0
    assert "split-copies-gradient" in codes(harness)


def test_partials_of_pairs_with_rows(monkeypatch):
    """The op's own implementation reads a row vector of 2N: every value twice."""
    leave_custom_ops(monkeypatch, "64x32:1x1:co")
    harness = check(mlp(CUTS["chunk"], GATES["SwiGLU"], True), randn(2, 5, D))
    (pair,) = [s.program for s in harness.fused if s.program.paired]
    assert [o.kind for o in pair.operands] == ["col", "row", "row"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_halves_that_are_no_floats_are_no_failure(dtype):
    """Strict: what warns would raise."""

    def function(x, w):
        gate, up = F.linear(x, w).chunk(2, -1)
        return gate * up

    harness = check(function, torch.ones(5, D, dtype=dtype), torch.ones(2 * HIDDEN, D, dtype=dtype))
    assert not harness.fused
