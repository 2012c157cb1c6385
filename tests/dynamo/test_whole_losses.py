# SPDX-License-Identifier: Apache-2.0
"""Losses of all positions but the last, or of logits with their classes in the second dimension,
are ones of the rows that the LM head makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, check_gradients, raised
from language_model import B, LanguageModel, T, V, inputs
from torch import nn

from coda_inductor.runtime import linear_cross_entropy
from coda_inductor.semantic.loss import cross_entropy


def hugging_face(z, t):
    rows, labels = z[..., :-1, :].contiguous(), t[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(rows.view(-1, V), labels.view(-1))


def flattened(z, t):
    return F.cross_entropy(z[:, :-1].flatten(0, 1), t[:, 1:].flatten(), ignore_index=3)


def summed(z, t):
    rows = z[:, 0:-1, :].reshape(-1, z.size(-1))
    loss = F.cross_entropy(rows, t[:, 1:].reshape(-1), reduction="sum", label_smoothing=0.1)
    return loss / (B * (T - 1))


def weighed(z, t):
    rows = z[:, :-1].reshape(-1, V)
    loss = F.cross_entropy(rows, t[:, 1:].reshape(-1), reduction="none")
    return (loss * torch.arange(B * (T - 1))).sum()


def transposed(z, t):
    return F.cross_entropy(z.transpose(1, 2), t, ignore_index=3)


def permuted(z, t):
    return (F.cross_entropy(z.permute(0, 2, 1), t, reduction="none") * (t != 3)).mean()


def swapped(z, t):
    return F.cross_entropy(z.transpose(-1, -2), t, label_smoothing=0.1, reduction="sum")


SHIFTED = (hugging_face, flattened, summed, weighed)
LOSSES = (*SHIFTED, transposed, permuted, swapped)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_the_heads_rows_are_read_as_they_are(loss, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", B * T * 8 * 128)
    harness = check_gradients(LanguageModel(loss), *inputs())
    assert raised(harness, cross_entropy) == 1
    assert harness.counts["cross_entropy"] == harness.counts["cross_entropy_backward"] == 1
    kept = [n.meta["val"] for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    assert sum(t.numel() in (B * T * V, B * (T - 1) * V) for t in kept) == 1  # the logits


def widened(z, t):
    return F.cross_entropy(z[:, :-1].float().reshape(-1, V), t[:, 1:].reshape(-1))


@pytest.mark.parametrize("loss", [widened, transposed], ids=lambda f: f.__name__)
def test_in_16_bits(loss):
    dtype = torch.bfloat16
    harness = check_gradients(
        LanguageModel(loss, dtype), *inputs(dtype), tolerance=TOLERANCE[dtype]
    )
    assert harness.counts["cross_entropy"] == 1


@pytest.mark.parametrize("loss", [transposed, hugging_face], ids=lambda f: f.__name__)
def test_dynamic_sizes(loss):
    """One more row a sequence would ask how long it is."""
    x, labels = inputs()
    torch._dynamo.mark_dynamic(labels, 1)
    torch._dynamo.mark_dynamic(x, 1)
    harness = check_gradients(LanguageModel(loss), x, labels)
    assert harness.counts["cross_entropy"] == (loss is transposed)


@pytest.mark.parametrize("loss", [hugging_face, flattened, transposed], ids=lambda f: f.__name__)
def test_no_sequences(loss):
    x, labels = inputs()
    harness = check_gradients(LanguageModel(loss), x.detach()[:0].requires_grad_(), labels[:0])
    assert raised(harness, cross_entropy) == 1


def test_logits_that_are_returned_too():
    def both(z, t):
        return hugging_face(z, t), z

    assert check_gradients(LanguageModel(both), *inputs()).counts["cross_entropy"] == 1


def without_the_first(z, t):
    return F.cross_entropy(z[:, 1:].reshape(-1, V), t[:, 1:].reshape(-1))


def without_the_last_two(z, t):
    return F.cross_entropy(z[:, :-2].reshape(-1, V), t[:, 2:].reshape(-1))


def without_the_last_class(z, t):
    return F.cross_entropy(z[..., :-1].reshape(-1, V - 1), t.reshape(-1) % (V - 1))


def without_the_last_sequence(z, t):
    return F.cross_entropy(z[:-1].reshape(-1, V), t[:-1].reshape(-1))


def weighted(z, t):
    weight = torch.linspace(0, 1, V, dtype=z.dtype)
    return F.cross_entropy(z[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1), weight)


def read_elsewhere(z, t):
    rows = z[:, :-1].reshape(-1, V)
    return F.cross_entropy(rows, t[:, 1:].reshape(-1)) + rows.square().mean()


def rounded(z, t):
    rows = z[:, :-1].float().double()
    return F.cross_entropy(rows.reshape(-1, V), t[:, 1:].reshape(-1))


def probabilities(z, t):
    return F.cross_entropy(z.transpose(1, 2), (2 * z.detach()).softmax(-1).transpose(1, 2))


def other_turn(z, t):
    return F.cross_entropy(z.permute(1, 2, 0), t.t())


OTHERS = (
    without_the_first, without_the_last_two, without_the_last_class, without_the_last_sequence,
    weighted, read_elsewhere, rounded, probabilities, other_turn,
)  # fmt: skip


@pytest.mark.parametrize("loss", OTHERS, ids=lambda f: f.__name__)
def test_others_stay(loss):
    harness = check_gradients(LanguageModel(loss), *inputs(), tolerance=1e-6)
    (root,) = (
        n for n in harness.raised.nodes if n.target is cross_entropy or n.target is F.cross_entropy
    )
    rows = root.args[0].meta["example_value"].numel() if root.target is cross_entropy else 0
    assert rows != B * T * V


def changed_between(z, t):
    z = z.detach().clone()
    rows = z[:, :-1].reshape(-1, V)
    z.zero_()
    return F.cross_entropy(rows, t[:, 1:].reshape(-1))


def test_logits_that_change_between_stay():
    check_gradients(LanguageModel(changed_between), *inputs())
