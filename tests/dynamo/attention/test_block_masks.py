# SPDX-License-Identifier: Apache-2.0
"""Attention beside a mask of any content becomes FlexAttention, which skips its empty blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn, reasons
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo.attention import block_masks

T = 300
sdpa = F.scaled_dot_product_attention
flex = torch.ops.higher_order.flex_attention


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Where torch runs it as its plain products, in every dtype and both directions."""
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float64, torch.float32, torch.bfloat16))


def inputs(heads=2, groups=2, t=T, keys=None, batch=2, d=16):
    q = randn(batch, heads, t, d)
    kv = [randn(batch, groups, keys or t, d) for _ in range(2)]
    return [x.requires_grad_() for x in (q, *kv)]


def calls(harness, target=flex):
    return [n for n in harness.raised.nodes if n.target is target]


def compare(attend, *args, **options):
    return check_gradients(attend, *args, gate="always", **options)


def test_smoke():
    mask = torch.rand(2, 1, T, T) > 0.5
    def attend(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask)
    harness = compare(attend, *inputs(), mask)
    assert harness.counts["block_mask"] == 1

def test_ckpt():
    mask = torch.rand(2, 1, T, T) > 0.5
    def attend(q, k, v, mask):
        def block(q):
            return sdpa(q, k, v, attn_mask=mask).sin()
        for _ in range(3):
            q = checkpoint(block, q, use_reentrant=False)
        return block(q)
    harness = compare(attend, *inputs(), mask)
    assert harness.counts["block_mask"] == 4
