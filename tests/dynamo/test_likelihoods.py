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


def dpo(logits, labels):
    kept = labels != 3
    labels = torch.where(kept, labels, 0)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels[..., None]).squeeze(2)
    return (each * kept).sum(-1)


def grpo(logits, labels):
    """Each row's probability against the old one."""
    each = torch.gather(torch.log_softmax(logits, -1), -1, labels[:, :, None])[..., 0]
    return -(each - each.detach()).exp().mean()


def openrlhf(logits, labels):
    chances = F.log_softmax(logits, dim=-1)
    return chances.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


LOSSES = {
    **{f.__name__: f for f in (openrlhf, dpo, grpo)},
    "flat": lambda z, y: z.reshape(-1, V).log_softmax(1).gather(1, y.reshape(-1, 1)).mean(),
    "along": lambda z, y: torch.take_along_dim(z.log_softmax(-1), y[..., None], -1).mean(),
}


@pytest.fixture
def slices(monkeypatch):
    """Let logits count as large, 16 bits too."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", B * T * 2 * 128)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_sliced(name, slices):
    harness = check_gradients(LanguageModel(LOSSES[name]), *inputs())
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


def changed_between(logits, labels):
    logits = logits.detach().clone()
    chances = logits.log_softmax(-1)
    logits.zero_()
    return chances.gather(-1, labels[..., None])


OTHERS = {
    **{f.__name__: f for f in (entropy, changed_between)},
    "other dimension": lambda z, y: z.log_softmax(1).gather(-1, y[..., None]),
    "several": lambda z, y: z.log_softmax(-1).gather(-1, torch.stack((y, y + 1), -1) % V),
    "some rows": lambda z, y: z.log_softmax(-1).gather(-1, y[:, 1:, None]),
    "across": lambda z, y: z.log_softmax(-1).gather(1, y[..., None] % T),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_loss_stays(name):
    harness = check(LanguageModel(OTHERS[name]), *inputs())
    assert raised(harness, cross_entropy) == 0


def test_no_index_is_ignored():
    """One below zero is an error, as it was."""
    harness = check_gradients(LanguageModel(openrlhf), *inputs())
    (loss,) = (n for n in harness.raised.nodes if n.target is cross_entropy)
    assert loss.args[2] == -(2**31)
    with pytest.raises((RuntimeError, IndexError)):
        cross_entropy_definition(randn(2, V), torch.tensor([1, -100]), *loss.args[2:])
