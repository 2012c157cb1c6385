# SPDX-License-Identifier: Apache-2.0
"""Norms that stay as they were written, each for its reason, and eager's values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, raised, randn
from passes import codes
from test_norms import EPS, HIDDEN, D, behind, norm

from coda_inductor.refusal import refuse
from coda_inductor.semantic.norms import rms_norm
from coda_inductor.sites import Sites


def norm_gemm(x, w, gamma, w2):
    """The smallest case: GEMM, norm, GEMM."""
    return F.linear(F.rms_norm(F.linear(x, w) + 1, (D,), gamma, EPS), w2)


def arguments():
    return tuple(randn(*s) for s in ((2, 4, D), (D, D), (D,), (HIDDEN, D)))


class Own(torch.autograd.Function):
    """Its first input. Both get gradients, of which the first changes sign if ``reverse``."""

    @staticmethod
    def forward(ctx, x, other, reverse):
        ctx.reverse = reverse
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient if ctx.reverse else gradient, gradient, None


def statistics_read(x, w, gamma, a):
    y, rstd = rms_norm(F.linear(x, w), gamma, EPS, torch.float64)
    return F.linear(y, a), rstd.detach()


def both(n, a):
    """GEMMs of the float32 norm n in float32 and, widened, in float64."""
    return F.linear(n, a.float()), F.linear(n.double(), a)


REFUSALS = {
    "behind softmax": (
        lambda x, w, g, a: F.linear(F.rms_norm(F.linear(x, w).softmax(-1), (D,), g, EPS), a),
        "norm-input-elsewhere",
    ),
    "both factors": (
        lambda x, w, g, a: (n := norm(x[0], w, g)) @ n.t() + a[0, 0], "norm-read-elsewhere",
    ),
    "rows reshaped": (
        behind(lambda n, a: n.reshape(-1, 2 * D) @ a.reshape(-1, 2 * D).t()), "norm-reshaped",
    ),
    "statistics read": (statistics_read, "no-gemm"),
    "different dtypes": (
        lambda x, w, g, a: both(norm(x.float(), w.float(), g.float()), a), "norm-gemm-dtypes",
    ),
    "reversed gradient": (
        lambda x, w, g, a: F.linear(Own.apply(norm(x, w, g), x.detach(), True), a), "norm-gradient",
    ),
    "gradient for another": (
        lambda x, w, g, a: F.linear(Own.apply(norm(x, w, g), x.sin(), False), a), "norm-gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_norm_stays_as_it_was(name):
    function, code = REFUSALS[name]
    x, *weights = arguments()
    forward = name == "different dtypes"
    run = check if forward else check_gradients
    harness = run(Weights(function, *weights), x.requires_grad_(not forward))
    assert code in codes(harness)
    assert raised(harness, rms_norm) == harness.ops()["aten.rsqrt.default"] == 1
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == 0


@pytest.mark.parametrize("width", [D, HIDDEN])
def test_gemm_that_may_not_be_fused_refuses_the_norm(monkeypatch, width):
    """The one that makes its input, or the one that reads it: for the cause that the GEMM has."""

    def refusal(self, gemm):
        out_of_luck = gemm.meta["val"].shape[-1] == width
        return refuse("too-small", "out of luck") if out_of_luck else None

    monkeypatch.setattr(Sites, "refusal", refusal)
    harness = check(norm_gemm, *arguments())
    assert harness.counts["rms_norm"] == 0
    (miss,) = harness.report.refusals
    assert (miss.code, miss.what, miss.failure) == ("too-small", "rms_norm", False)
    assert miss.text.endswith("out of luck")


@pytest.mark.parametrize(("k", "d"), [(8, 0), (0, 8)])
def test_norms_of_nothing_are_no_failure(k, d):
    """Strict: what warns would raise."""

    def function(x, w, v):
        return F.linear(F.rms_norm(F.linear(x, w), (d,)), v)

    check(function, randn(4, k), randn(d, k), randn(6, d))
