# SPDX-License-Identifier: Apache-2.0
"""Losses of logits that are a number times the head's."""

from __future__ import annotations

import copy

import pytest
import torch
from checking import check_gradients, differentiate
from harness import Harness, Stock
from passes import codes
from test_loss import (
    ROWS,
    LanguageModel,
    V,
    a_row_each,
    hugging_face,
    inputs,
    slices,
    smoothed,
    summed,
)

__all__ = ["slices"]


def granite(logits, labels):
    return hugging_face(logits / 7, labels)


def cohere(logits, labels):
    return smoothed(logits * 0.125, labels)


def each_row(logits, labels):
    return a_row_each(-3 * logits, labels)


def scaled_and_capped(logits, labels):
    return summed(1.5 * torch.tanh((logits * 0.3) / 1.5), labels)


def with_a_z_loss(logits, labels):
    logits = logits / 7
    return hugging_face(logits, labels) + 0.01 * logits.logsumexp(-1).square().mean()


SCALED = (granite, cohere, each_row, scaled_and_capped, with_a_z_loss)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", SCALED)
def test_sliced_gradients_of_scaled_logits(loss, bias, slices):
    harness = check_gradients(LanguageModel(loss, bias=bias), *inputs())
    assert harness.counts["cross_entropy"] == harness.counts["cross_entropy_backward"] == 1
    made = [n.meta.get("val") for n in harness.parts[1].nodes if n.op == "call_function"]
    assert ROWS * V not in [t.numel() for t in made if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("loss", [granite, cohere])
def test_scaled_logits_in_bfloat16(loss, slices):
    """The factor is not rounded into the gradient of the loss."""
    model, (x, labels) = LanguageModel(loss, torch.bfloat16), inputs(torch.bfloat16)

    def trained(make, wide=False):
        twin, leaf = copy.deepcopy(model), x.detach().clone()
        if wide:
            twin, leaf = twin.double(), leaf.double()
        given = leaf.requires_grad_(), labels
        loss = make(twin, given)
        return [t.double() for t in differentiate(loss, (twin, given))[:-1]]

    exact = trained(lambda m, given: m(*given), wide=True)
    ours = trained(lambda m, given: Harness(reference=True).train(m, *given))
    stock = trained(lambda m, given: Stock().train(m, *given))
    eager = trained(lambda m, given: m(*given))
    for have, want, *others in zip(ours, exact, stock, eager, strict=True):
        bound = max((other - want).norm() for other in others)
        assert (have - want).norm() <= 1.2 * bound


def test_two_readers_of_scaled_logits_are_told(slices):
    def loss(logits, labels):
        scaled = logits * 0.5
        return hugging_face(scaled, labels) + scaled.square().mean()

    harness = check_gradients(LanguageModel(loss), *inputs())
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-read" in codes(harness)
