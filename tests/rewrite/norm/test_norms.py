# SPDX-License-Identifier: Apache-2.0
"""The rewrite of RMSNorm between GEMMs: same function, nothing normalized is stored, or a reason.

Everything runs in float64, where a wrong identity shows far above the rounding.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from blocks import HIDDEN, Layer, stack
from checking import check, leave_custom_ops, raised, randn
from passes import codes
from torch import nn

from coda_inductor.plan import Plan
from coda_inductor.refusal import refuse
from coda_inductor.semantic.norms import rms_norm

D, EPS = 16, 1e-2  # large beside mean(x^2), so that an eps in the wrong place shows


@pytest.mark.parametrize("turned", [False, True])
def test_the_gemm_in_front_is_found_however_deep_the_stream_is(turned):
    """A regression: with the residual on the right (GPT-2 writes it so), the search went through
    the whole stream first, gave up, and from the fifth layer on took an older GEMM for it."""

    class Deep(Layer):
        def forward(self, x):
            y = self.o(self.v(self.norm1(x)).cumsum(1))
            x = y + x if turned else x + y
            z = self.down(F.gelu(self.gate(self.norm2(x))))
            return z + x if turned else x + z

    layers = 12
    deep = nn.Sequential(nn.Linear(D, D), *(Deep() for _ in range(layers))).double()
    harness = check(deep, randn(2, 5, D))
    assert harness.counts["rms_norm"] == 2 * layers


def norm_gemm(x, w, gamma, w2):
    """The smallest case: GEMM, norm, GEMM."""
    return F.linear(F.rms_norm(F.linear(x, w) + 1, (D,), gamma, EPS), w2)


def arguments(dtype=torch.float64):
    return tuple(randn(*s, dtype=dtype) for s in ((2, 3, D), (D, D), (D,), (HIDDEN, D)))


@pytest.mark.parametrize(("layers", "bias"), [(3, False), (2, True)])
def test_block_is_the_same_function_and_counts_follow_the_layers(layers, bias):
    harness = check(stack(layers, bias=bias), randn(2, 5, D))
    # The last layer's down projection has no norm behind it, but the residual in front.
    counts = {"rms_norm": 2 * layers, "swiglu": layers, "residual": 2 * layers}
    assert {name: harness.counts[name] for name in counts} == counts
    assert harness.ops()["aten.addmm.default"] == 0  # a bias is added behind the deferred scale
    # Input, v, o, gate/up as one pair, down.
    assert len(harness.report.sites) == len(harness.fused) == 1 + 4 * layers
    assert harness.ops()["aten.mm.default"] == 1 + 5 * layers


def test_no_normalized_tensor_is_stored(monkeypatch):
    leave_custom_ops(monkeypatch)
    layers = 2
    harness = check(stack(layers), randn(2, 5, D))
    before = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert len(before) == 2 * layers
    ops = harness.ops()
    assert ops["coda_inductor.gemm_epilogue.default"] == 1 + 4 * layers
    assert ops["coda_inductor.rms_norm.default"] == 0
    # What is left of a norm is a vector's worth of work: rstd from the partials.
    assert ops["aten.rsqrt.default"] == 2 * layers
    renames = ("view", "reshape", "permute", "getitem", "gemm_epilogue")
    computed = [
        str(n.target) for n in harness.graph.nodes
        if n.op == "call_function" and not any(word in str(n.target) for word in renames)
        and n.meta["val"].shape[-1] in (D, HIDDEN)
    ]  # fmt: skip
    assert computed == ["aten.cumsum.default"] * layers


@pytest.mark.parametrize("weighted", [True, False])
def test_norm_moves_past_its_gemm(weighted):
    x, w, gamma, w2 = arguments()
    harness = check(norm_gemm, x, w, gamma if weighted else None, w2)
    assert harness.counts == {"rms_norm": 1}
    producer, consumer = (site.program for site in harness.fused)
    assert [r.combine for r in producer.reduces] == ["add"]
    assert [o.kind for o in consumer.operands] == ["col"]
    assert [s.op for s in consumer.steps] == ["mul"]


@pytest.mark.parametrize(("alpha", "beta"), [(1, -3), (0.5, 0.25)])
def test_norm_moves_past_addmm_with_alpha_and_beta(alpha, beta):
    def function(x, w, gamma, w2, bias):
        n = F.rms_norm(x @ w, (D,), gamma, EPS)
        return torch.addmm(bias, n, w2.t(), alpha=alpha, beta=beta)

    x, *weights = arguments()
    assert check(function, x[0], *weights, randn(HIDDEN)).counts == {"rms_norm": 1}


def test_residual_stream_stays_unnormalized_for_its_other_readers():
    def function(x, w, gamma, w2):
        stream = x + F.linear(x, w)
        return F.linear(F.rms_norm(stream, (D,), gamma, EPS), w2), stream

    harness = check(function, *arguments())
    assert harness.counts == {"rms_norm": 1, "residual": 1}
    assert len(harness.fused[0].program.stores) == 2


def normed(x, w, gamma):
    return F.rms_norm(F.linear(x, w), (D,), gamma, EPS)


def behind_softmax(x, w, gamma, w2):
    return F.linear(F.rms_norm(F.linear(x, w).softmax(-1), (D,), gamma, EPS), w2)


def both_factors(x, w, gamma, w2):
    n = normed(x[0], w, gamma)
    return n @ n.t()


def gemms_in_different_dtypes(x, w, gamma, w2):
    n = normed(x, w, gamma)
    return F.linear(n, w2), F.linear(n.float(), w2.float())


def statistics_read(x, w, gamma, w2):
    y, rstd = rms_norm(F.linear(x, w), gamma, EPS, torch.float64)
    return F.linear(y, w2), rstd


REFUSALS = {
    "behind softmax": (behind_softmax, "norm-input-elsewhere"),
    "never multiplied": (
        lambda x, w, gamma, w2: normed(x, w, gamma).cumsum(0) + w2.sum(), "norm-read-elsewhere",
    ),
    "both factors": (both_factors, "norm-read-elsewhere"),
    "rows reshaped": (
        lambda x, w, gamma, w2: (
            normed(x, w, gamma).reshape(-1, 2 * D) @ w2.reshape(-1, 2 * D).t()
        ),
        "norm-reshaped",
    ),
    "statistics read": (statistics_read, "norm-statistics-read"),
    "different dtypes": (gemms_in_different_dtypes, "norm-gemm-dtypes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_norm_stays_as_it_was(name):
    function, code = REFUSALS[name]
    harness = check(function, randn(2, 4, D), *arguments()[1:])
    assert raised(harness, rms_norm) == 1
    assert harness.counts["rms_norm"] == 0
    assert code in codes(harness)
    assert harness.ops()["aten.rsqrt.default"] == 1


def test_dead_norm_disappears():
    def dead(x, w, gamma, w2):
        normed(x, w, gamma)
        return F.linear(x, w2)

    harness = check(dead, *arguments())
    assert harness.counts["rms_norm"] == harness.ops()["aten.rsqrt.default"] == 0


@pytest.mark.parametrize("width", [D, HIDDEN])
def test_gemm_that_may_not_be_fused_refuses_the_norm(monkeypatch, width):
    """The one that makes its input, or the one that reads it: for the cause that the GEMM has."""

    def legal(self, gemm):
        out_of_luck = gemm.meta["val"].shape[-1] == width
        return refuse("too-small", "out of luck") if out_of_luck else None

    monkeypatch.setattr(Plan, "legal", legal)
    harness = check(norm_gemm, *arguments())
    assert harness.counts["rms_norm"] == 0
    (miss,) = harness.report.refusals
    assert (miss.code, miss.what, miss.failure) == ("too-small", "rms_norm", False)
    assert miss.text.endswith("out of luck")


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("k", "d"), [(8, 0), (0, 8), (0, 0)])
def test_norms_of_nothing_are_no_failure(norm, k, d):
    """Strict: what warns would raise."""

    def function(x, w, v):
        return F.linear(norm(F.linear(x, w), (d,)), v)

    check(function, randn(4, k), randn(d, k), randn(6, d))
