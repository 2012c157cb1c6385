# SPDX-License-Identifier: Apache-2.0
"""Rules at the edge of what they are good for: nothing has more than 1.2 times the error of the
worse of eager and torch.compile, in bfloat16, against float64 (``zoo.edges`` has the cases).

In both numerics: the kernels', which do not round products before their epilogue ("reference"), and
that of plain ops. ``tests/gpu/test_gpu_exact.py`` asks the same of the kernels.
"""

import functools

import pytest
import torch
from checking import randn
from harness import Harness, Stock
from zoo import edges

D, HIDDEN, ROWS, V = 128, 256, 64, 512
HARD = [how for how in edges.SINGULAR if how[1] == 1000]
KERNELS = pytest.mark.parametrize("reference", [True, False], ids=["kernels", "plain ops"])


def hold(model, *inputs, tangent=None, reference=True, training=True):
    harness, stock = Harness(reference=reference), Stock()
    calls = [b.train if training else b.run for b in (stock, harness)]
    compilers = [functools.partial(functools.partial, call) for call in calls]
    edges.hold(model, inputs, compilers, tangent, training)
    return harness


@KERNELS
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_loss_of_confident_tokens(cap, reference):
    """At 14 the loss is 0.001: what is left of p - 1 must not be the rounding of a logit. Beyond,
    at 1e-5, float32 itself cannot tell a log-sum-exp of 20 from its logit (rules.md)."""
    case = edges.confident(14, d=D, rows=ROWS, vocabulary=V, cap=cap)
    assert hold(*case, reference=reference).counts["cross_entropy"] == 1


@KERNELS
@pytest.mark.parametrize(("kind", "singular"), HARD)
def test_norm_before_an_ill_conditioned_weight(kind, singular, reference):
    """Rule R3, and the row scale on dz: where the gradient comes from outside, it has nothing of
    the weight's main direction."""
    model = edges.Normed(kind, singular, D, HIDDEN)
    tangent = edges.across(model, ROWS, HIDDEN)
    harness = hold(model, randn(ROWS, D), randn(ROWS, D), tangent=tangent, reference=reference)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == 1


@pytest.mark.parametrize("kind", ["swiglu", "attention"])
def test_rows_of_zeros_and_of_infinity(kind):
    """What is not finite in eager is not finite here, and nothing else."""
    x, y = randn(ROWS, D).bfloat16(), randn(ROWS, D).bfloat16()
    model = edges.Normed(kind, 1, D, HIDDEN).bfloat16()
    x[3], y[3] = 0, 0
    x[ROWS - 5, 2], x[ROWS - 9, 3] = float("inf"), float("nan")
    ours = Harness().run(model, x, y)
    with torch.no_grad():
        assert torch.equal(ours.isfinite(), model(x, y).isfinite())
