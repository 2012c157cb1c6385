# SPDX-License-Identifier: Apache-2.0
"""Masks that are filled in place count as filled out of place, where nobody could tell."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn, reasons
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo.attention import block_masks

T = 20
sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float64,))


def ones():
    return torch.ones(T, T, dtype=torch.bool)


def inputs():
    return [randn(2, 2, T, 16).requires_grad_() for _ in range(3)]


def filled(hidden):
    mask = ones()
    mask.masked_fill_(hidden, False)
    return mask


def nested(hidden):
    return torch.ones_like(ones()).masked_fill_(hidden, False)


def read_before(hidden):
    mask = ones()
    mask.sum()
    return mask.masked_fill_(hidden, False)


def viewed_before(hidden):
    mask = ones()
    view = mask.view(-1)
    mask.masked_fill_(hidden, False)
    return view.view(T, T)


def like_turned(hidden):
    return torch.ones_like(ones().t()).masked_fill_(hidden, False)


@pytest.mark.parametrize("make", [filled, nested, read_before, viewed_before, like_turned])
@pytest.mark.parametrize("region", [False, True])
def test_data(make, region):
    def attend(q, k, v, hidden):
        mask = make(hidden)

        def block(q):
            return sdpa(q, k, v, attn_mask=mask).sin()

        if region:
            return checkpoint(lambda q: checkpoint(block, q, use_reentrant=False).cos(), q,
                              use_reentrant=False)  # fmt: skip
        return block(q), mask

    harness = check_gradients(attend, *inputs(), torch.rand(T, T) > 0.5, gate="always")
    assert harness.counts["block_mask"] == 1


def documented(hidden):
    """As torch's documentation of SDPA writes its masks."""
    bias = torch.zeros(T, T, dtype=torch.float64)
    bias.masked_fill_(hidden, -math.inf)
    return bias


CAUSAL = {
    "masked_fill_": lambda t: documented(torch.ones(t, t, dtype=torch.bool).tril().logical_not()),
    "triu_": lambda t: torch.full((t, t), -math.inf, dtype=torch.float64).triu_(1),
    "tril_": lambda t: torch.ones(t, t, dtype=torch.bool).tril_(),
    "two in a row": lambda t: documented(torch.ones(t, t, dtype=torch.bool)).triu_(1),
}


@pytest.mark.parametrize("how", CAUSAL)
def test_constants(how):
    def attend(q, k, v):
        return sdpa(q, k, v, attn_mask=CAUSAL[how](q.shape[2]))

    assert check_gradients(attend, *inputs()).counts["constant_mask"] == 1


def test_symbolic_sizes():
    def attend(q, k, v):
        return sdpa(q, k, v, attn_mask=CAUSAL["triu_"](q.shape[2]))

    assert check_gradients(attend, *inputs(), dynamic=True).counts["constant_mask"] == 0


def written_again(hidden):
    mask = filled(hidden)
    mask.view(-1)[::3] = True
    return mask


def test_one_that_is_written_to_again_stays():
    def attend(q, k, v, hidden):
        return sdpa(q, k, v, attn_mask=written_again(hidden))

    harness = check(attend, *inputs(), torch.rand(T, T) > 0.5, gate="always")
    assert not harness.counts["block_mask"]
    assert "an in-place op changes it" in reasons(harness)
