# SPDX-License-Identifier: Apache-2.0
"""Raising: every spelling of an idiom becomes one semantic op; near misses stay, with a reason, and
so do functions that are named as torch's, and are others. A pattern that fails costs no other."""

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, assert_same, check, raised, randn, reasons, side_by_side, swiglu
from harness import Harness

from coda_inductor.matching import Idiom
from coda_inductor.semantic import rms_norm

D = 16


def norm(x, w, eps=1e-5):
    h = x.float() if x.dtype == torch.bfloat16 else x
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def test_eps_none_is_the_epsilon_of_the_compute_dtype():
    # With inputs around 1e-3 a wrong eps is off by a factor; with inputs around 1 it hides.
    dtypes = torch.bfloat16, torch.float16, torch.float32, torch.float64
    given = [(randn(4, D, dtype=d) * 1e-3, randn(D, dtype=d)) for d in dtypes]

    def function(given):
        return [F.rms_norm(x, (D,), weight) for x, w in given for weight in (w, None)]

    assert raised(check(function, given), rms_norm) == 2 * len(dtypes)


def test_float32_weight_keeps_the_promoted_dtype():
    x, w = randn(2, 3, D, dtype=torch.bfloat16), randn(D, dtype=torch.float32)
    harness = check(norm, x, w, tolerance=TOLERANCE[torch.bfloat16])
    (op,) = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert op.args[3] == torch.float32


SWIGLUS = {
    "silu first": lambda g, u: F.silu(g) * u,
    "up first": lambda g, u: u * F.silu(g),
    "sigmoid": lambda g, u: g * torch.sigmoid(g) * u,
    "sigmoid first": lambda g, u: u * (g.sigmoid() * g),
    "rounded between": lambda g, u: F.silu(g.float()).to(g.dtype) * u,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_spelling_of_swiglu_raises_once(dtype):
    function, tensors = side_by_side(SWIGLUS.values(), (3, D), (3, D))
    harness = check(function, *(t.to(dtype) for t in tensors))
    assert raised(harness, swiglu) == len(SWIGLUS)
    assert not any("silu" in str(n.target) for n in harness.raised.nodes)


def test_what_is_not_swiglu_stays():
    def widened(g, u):
        return F.silu(g.float()) * u

    gate, up = bf16(3, D), bf16(3, D)
    for function, other, why in (
        (SWIGLUS["silu first"], up[:1], "differ in shape"),
        (widened, up, "another dtype"),
        (widened, up.float(), "in another dtype than its input's"),
    ):
        harness = check(function, gate, other)
        assert raised(harness, swiglu) == 0
        assert why in reasons(harness)


def test_changing_the_eps_of_a_trained_norm():
    class Norm(torch.nn.Module):
        eps = 1e-3

        def forward(self, x):
            return norm(x, 1.0, self.eps)

    model, harness = Norm(), Harness()
    compiled = torch.compile(model, backend=harness, dynamic=True)
    graphs = []
    for model.eps in (1e-3, 0.5):
        for rows in (3, 4):
            x = randn(rows, D).requires_grad_()
            gradients = [torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (compiled, model)]
            assert_same(*gradients)
            graphs.append(harness.graphs)
        assert raised(harness, rms_norm) == 1
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3]


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


def test_inputs_in_float8(warned):
    def function(x, gate, up):
        up = up.to(torch.bfloat16)
        y = F.silu(gate.to(torch.bfloat16)) * up
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y, F.rms_norm(y, (D,), None, 1e-5), h

    harness = check(function, *(bf16(3, D).to(torch.float8_e5m2) for _ in range(3)))
    assert (raised(harness, swiglu), raised(harness, rms_norm)) == (1, 2)
    assert not warned()


def test_quantizing_inside_an_idiom_is_no_rounding():
    """Other casts are looked through; this one changes the result by percents."""

    def function(x, up):
        gate = F.silu(x).to(torch.float8_e4m3fn).to(torch.bfloat16)
        h = (x * x).to(torch.float8_e4m3fn).to(torch.bfloat16)
        return gate * up, x * torch.rsqrt(h.mean(-1, keepdim=True) + 1e-5)

    harness = check(function, bf16(3, D), bf16(3, D), tolerance=0)
    assert raised(harness, swiglu) == raised(harness, rms_norm) == 0


def test_a_matcher_that_fails_costs_one_match(monkeypatch, warned):
    def function(x, y):
        a = F.silu(x) * y
        b = F.rms_norm(a, (D,), None, 1e-5)
        return F.silu(b) * x

    def failing(self, root):
        if "silu" in str(self.root.all_input_nodes):
            failed.append(root)
            if len(failed) == 1:
                raise TypeError("Promotion for Float8 Types is not supported")
        return found(self, root)

    found, failed = Idiom.match, []
    monkeypatch.setattr(Idiom, "match", failing)
    harness = check(function, bf16(3, D), bf16(3, D), strict=False)
    assert raised(harness, rms_norm) == raised(harness, swiglu) == 1
    assert "the pattern itself failed: TypeError" in reasons(harness)
    (warning,) = warned()
    assert "pattern swiglu" in warning


LIBRARY = torch.library.Library("coda_tests_names", "DEF")
LIBRARY.define("rsqrt(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("rsqrt", lambda x: 2 * torch.rsqrt(x), "CompositeExplicitAutograd")
torch.library.register_fake("coda_tests_names::rsqrt", torch.rsqrt, lib=LIBRARY)


@torch.compiler.allow_in_graph
def rsqrt(x):
    return 3 * torch.rsqrt(x)


def test_what_is_somebody_elses_is_no_idiom():
    op = torch.ops.coda_tests_names.rsqrt
    functions = [lambda x, root=root: x * root(x.pow(2).mean(-1, keepdim=True) + 1e-6)
                 for root in (op, op.default, rsqrt)]  # fmt: skip
    function, tensors = side_by_side(functions, (4, D))
    assert raised(check(function, *tensors), rms_norm) == 0
