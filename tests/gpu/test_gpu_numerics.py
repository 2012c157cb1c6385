# SPDX-License-Identifier: Apache-2.0
"""Kernels at the edge of what their rules are good for (``edges``): at most 1.2 times the error of
the worse of eager and torch.compile, forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from checking import randn
from layers import compiled
from zoo import edges

from coda_inductor import reports

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("fresh")]

D, HIDDEN, ROWS, V = 256, 640, 264, 2056


def hold(model, *inputs, tangent=None, training=True):
    """Every fused site is a kernel; returns the patterns that they absorbed."""

    def compile_with(compiler):
        def call(m):
            torch._dynamo.reset()
            return compiler(m)

        return call

    inputs = [x.cuda() for x in inputs]
    compilers = [compile_with(torch.compile), compile_with(compiled)]
    edges.hold(model.cuda(), inputs, compilers, tangent, training)
    fused = [site for report in reports() for site in report.sites if site.fused]
    assert fused
    assert {site.how for site in fused} == {"kernel"}
    return {pattern for site in fused for pattern in site.patterns}


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("confidence", [1, 8, 11, 14])
def test_loss_of_confident_tokens(confidence, cap):
    hold(*edges.confident(confidence, d=D, rows=ROWS, vocabulary=V, cap=cap))


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize("mean", [0, 10, 100, 1000])
def test_layer_norm_after_an_update_with_a_large_mean(mean, start):
    model, x = edges.Stream(mean, D, HIDDEN), randn(ROWS, D) + start
    assert "layer_norm" in hold(model, x, randn(ROWS, D), training=False)


@pytest.mark.parametrize(("kind", "singular"), edges.SINGULAR)
def test_norm_before_an_ill_conditioned_weight(kind, singular):
    model = edges.Normed(kind, singular, D, HIDDEN)
    tangent = edges.across(model, ROWS, HIDDEN)
    assert "rms_norm" in hold(model, randn(ROWS, D), randn(ROWS, D), tangent=tangent)


def test_outlier_channels():
    x = randn(ROWS, D)
    x[:, 5::50] *= 1000
    hold(edges.Normed("swiglu", 1, D, HIDDEN), x, randn(ROWS, D))
