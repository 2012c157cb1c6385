# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens that are gathered by hand, as policy gradients and DPO write them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, check, check_gradients, raised, randn
from language_model import B, LanguageModel, T, V, inputs

from coda_inductor.runtime import linear_cross_entropy
from coda_inductor.semantic.loss import cross_entropy, cross_entropy_definition


def openrlhf(logits, labels):
    chances = F.log_softmax(logits, dim=-1)
    return chances.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


def dpo(logits, labels):
    kept = labels != 3
    labels = torch.where(kept, labels, 0)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels[..., None]).squeeze(2)
    return (each * kept).sum(-1)


def grpo(logits, labels):
    """Each row's probability against the old one."""
    each = torch.gather(torch.log_softmax(logits, -1), -1, labels[:, :, None])[..., 0]
    return -(each - each.detach()).exp().mean()


def flat(logits, labels):
    rows = logits.reshape(-1, V)
    return rows.log_softmax(1).gather(1, labels.reshape(-1, 1)).mean()


def along(logits, labels):
    return torch.take_along_dim(logits.log_softmax(-1), labels[..., None], -1).mean()


def difference(logits, labels):
    return (torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None]).squeeze(-1)).mean()


def trl(logits, labels):
    picked = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(dim=-1)


def megatron(logits, labels):
    """Of logits that are widened where they are read, with a dimension of one."""
    picked = logits.double().gather(2, labels[..., None])
    return (torch.logsumexp(logits.double(), dim=(-1,), keepdim=True) - picked)[..., 0]


def with_z_loss(logits, labels):
    total = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, labels[..., None])[..., 0]
    return (total - picked + 1e-3 * total.square()).mean()


LOSSES = (openrlhf, dpo, grpo, flat, along, difference, trl, megatron, with_z_loss)


@pytest.fixture
def slices(monkeypatch):
    """Let logits count as large, 16 bits too."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", B * T * 2 * 128)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_sliced(loss, slices):
    harness = check_gradients(LanguageModel(loss), *inputs())
    assert raised(harness, cross_entropy) == harness.counts["cross_entropy"] == 1
    assert harness.counts["cross_entropy_backward"] == 1
    kept = [n.meta["val"] for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    assert sum(t.numel() == B * T * V for t in kept) == 1  # the logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_the_dtype_that_was_asked_for(dtype):
    """A softmax in float32 of logits in 16 bits."""

    def wide(logits, labels):
        return F.log_softmax(logits, -1, dtype=torch.float32).gather(-1, labels[..., None])

    harness = check_gradients(
        LanguageModel(wide, dtype), *inputs(dtype), tolerance=TOLERANCE[dtype]
    )
    assert raised(harness, cross_entropy) == 1


def entropy(logits, labels):
    chances = logits.log_softmax(-1)
    return chances.gather(-1, labels[..., None]), (chances.exp() * chances).sum(-1)


def other_dimension(logits, labels):
    return logits.log_softmax(1).gather(-1, labels[..., None])


def several(logits, labels):
    return logits.log_softmax(-1).gather(-1, torch.stack((labels, labels + 1), -1) % V)


def some_rows(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, 1:, None])


def across(logits, labels):
    return logits.log_softmax(-1).gather(1, labels[..., None] % T)


def changed_between(logits, labels):
    logits = logits.detach().clone()
    chances = logits.log_softmax(-1)
    logits.zero_()
    return chances.gather(-1, labels[..., None])


def sum_of_both(logits, labels):
    return torch.logsumexp(logits, -1) + logits.gather(-1, labels[..., None]).squeeze(-1)


def of_other_logits(logits, labels):
    return torch.logsumexp(logits * 2, -1) - logits.gather(-1, labels[..., None]).squeeze(-1)


def over_positions(logits, labels):
    picked = logits[:, :1].gather(-1, labels[:, :1, None])
    return torch.logsumexp(logits[:, :1], 1, keepdim=True) - picked


def of_every_pair(logits, labels):
    """(B, T, 1) against (B, T) is (B, T, T) for B of 1."""
    logits, labels = logits[:1], labels[:1]
    return torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None])


def scaled(logits, labels):
    picked = logits.gather(-1, labels[..., None]).squeeze(-1)
    return torch.sub(torch.logsumexp(logits, -1), picked, alpha=0.5)


def difference_changed_between(logits, labels):
    logits = logits.detach().clone()
    total, picked = torch.logsumexp(logits, -1), logits.gather(-1, labels[..., None]).squeeze(-1)
    logits.zero_()
    return total - picked


OTHERS = (
    entropy, other_dimension, several, some_rows, across, changed_between, sum_of_both,
    of_other_logits, over_positions, of_every_pair, scaled, difference_changed_between,
)  # fmt: skip


@pytest.mark.parametrize("loss", OTHERS, ids=lambda f: f.__name__)
def test_what_is_no_loss_stays(loss):
    harness = check(LanguageModel(loss), *inputs())
    assert raised(harness, cross_entropy) == 0


def test_no_index_is_ignored():
    """One below zero is an error, as it was."""
    harness = check_gradients(LanguageModel(openrlhf), *inputs())
    (loss,) = (n for n in harness.raised.nodes if n.target is cross_entropy)
    assert loss.args[2] == -(2**31)
    with pytest.raises((RuntimeError, IndexError)):
        cross_entropy_definition(randn(2, V), torch.tensor([1, -100]), *loss.args[2:])
