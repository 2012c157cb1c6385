# SPDX-License-Identifier: Apache-2.0
"""Losses of logits that are a number times the head's, and of some of their rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import check_gradients, differentiate
from harness import Harness, Stock
from language_model import D, LanguageModel, V, inputs
from passes import codes
from test_loss import ROWS, a_row_each, hugging_face, slices, smoothed, summed

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


@pytest.mark.parametrize("loss", SCALED)
def test_sliced_gradients_of_scaled_logits(loss, slices):
    harness = check_gradients(LanguageModel(loss, bias=True), *inputs())
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


def wide(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def shifted(logits, labels):
    """As models were written before Hugging Face padded labels."""
    logits, labels = wide(logits)[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def rows_weighted(logits, labels):
    logits, labels = logits[:, 1:].reshape(-1, V), labels[:, 1:].reshape(-1)
    losses = F.cross_entropy(logits, labels, ignore_index=3, reduction="none")
    return losses * torch.arange(len(labels)).to(losses.dtype)


def first_sequence(logits, labels):
    return F.cross_entropy(logits[:1].reshape(-1, V), labels[:1].reshape(-1), reduction="sum")


def capped_and_shifted(logits, labels):
    return shifted(1.5 * torch.tanh(logits / 1.5), labels)


def penalized_rows(logits, labels):
    rows = wide(logits[:, :-1].reshape(-1, V))
    loss = F.cross_entropy(rows, labels[:, 1:].reshape(-1))
    return loss + 0.01 * rows.logsumexp(-1).square().mean()


SOME_ROWS = (shifted, rows_weighted, first_sequence, capped_and_shifted)


@pytest.mark.parametrize("loss", SOME_ROWS)
def test_sliced_gradients_of_some_rows(loss, slices):
    harness = check_gradients(LanguageModel(loss, bias=True), *inputs())
    assert harness.counts["cross_entropy_backward"] == 1
    made = [n.meta.get("val") for n in harness.parts[1].nodes if n.op == "call_function"]
    sizes = [t.numel() for t in made if isinstance(t, torch.Tensor)]
    assert not any(size % V == 0 and size > V * D for size in sizes)


def test_shifted_logits_are_kept_in_16_bits(slices):
    model = LanguageModel(shifted, torch.bfloat16)
    harness = check_gradients(model, *inputs(torch.bfloat16))
    assert harness.counts["cross_entropy_backward"] == 1
    kept = [n.meta["val"] for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    logits = [t for t in kept if t.numel() in (ROWS * V, (ROWS - 2) * V)]
    assert [(t.dtype, t.numel()) for t in logits] == [(torch.bfloat16, ROWS * V)]


def every_second(logits, labels):
    return F.cross_entropy(logits[:, ::2].reshape(-1, V), labels[:, ::2].reshape(-1))


def some_classes(logits, labels):
    return F.cross_entropy(logits[..., :200].reshape(-1, 200), labels.reshape(-1) % 200)


def rounded(logits, labels):
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, V), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("loss", [every_second, some_classes, rounded, penalized_rows])
def test_other_parts_are_not_sliced(loss, slices):
    harness = check_gradients(LanguageModel(loss), *inputs(), tolerance=1e-5)
    assert harness.counts["cross_entropy_backward"] == 0
    assert {"logits-read", "logits-form"} & set(codes(harness))


def test_rows_of_float16_may_overflow(slices):
    harness = check_gradients(LanguageModel(shifted, torch.float16), *inputs(torch.float16))
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-read" in codes(harness)
