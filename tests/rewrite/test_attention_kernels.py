# SPDX-License-Identifier: Apache-2.0
"""Attention that runs as plain ops is said to, whoever made them, and nothing else is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from coda_inductor.graph.attention import MATH, WRITTEN_OUT
from coda_inductor.remedies import REMEDIES

B, H, T, D = 2, 3, 16, 8


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def asked_for(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def masked(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=q[:1, :1, :, :1] > 0)


def eager(q, k, v):
    """Hugging Face's, with a mask that is added and the softmax in float32."""
    scores = q @ k.transpose(2, 3) * D**-0.5 + torch.ones(T, T).triu(1).to(q.dtype) * -1e4
    weights = F.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, 0.0, training=True) @ v


def einsum(q, k, v):
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def products(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(torch.ones(1, 1, 1).to(q), q, k.transpose(1, 2))
    return torch.bmm((scores - scores.amax(-1, True)).exp().softmax(2), v)


def capped(q, k, v):
    return (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v


def inputs(dtype=torch.float64, values=D):
    sizes = D, D, values
    return tuple(randn(B, H, T, size, dtype=dtype).requires_grad_() for size in sizes)


def told(harness):
    return {why.code for why in harness.report.refusals if why.what == "attention"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [asked_for, masked])
def test_sdpas_math(function, dtype):
    """It computes scores of 16 bits in 32."""
    harness = check_gradients(function, *inputs(dtype))
    assert harness.report.attention == Counter({MATH: 1})
    (why,) = [why for why in harness.report.refusals if why.what == "attention"]
    assert why.code == "attention-math"
    wide = "float64" if dtype == torch.float64 else "float32"
    assert f"{B * H} x {T} x {T} scores in {wide} on cpu" in why.text
    assert not why.failure
    assert "sdpa_kernel" in REMEDIES[why.code].text
    assert f"attention: 1 x {MATH}" in harness.report.table()


def test_math_that_torch_chose_by_itself():
    """No kernel of a CPU has values of another width than keys."""
    harness = check(sdpa, *inputs(values=4))
    assert harness.report.attention == Counter({MATH: 1})
    assert told(harness) == {"attention-math"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [eager, einsum, products, capped])
def test_written_out(function, dtype):
    """Once in a training step too: its gradient is made of such products."""
    for run in (check, check_gradients):
        harness = run(function, *inputs(dtype))
        assert harness.report.attention == Counter({WRITTEN_OUT: 1})
        assert told(harness) == {"attention-written-out"}
    assert "scaled_dot_product_attention" in REMEDIES["attention-written-out"].text


def test_beside_a_kernel_and_in_a_checkpoint():
    def function(q, k, v):
        y = checkpoint(eager, q, k, sdpa(q, k, v), use_reentrant=False)
        return asked_for(q, k, einsum(q, k, y))

    harness = check_gradients(function, *inputs())
    assert harness.report.attention == Counter({"FlashAttention": 1, MATH: 1, WRITTEN_OUT: 2})


def test_any_number_of_queries():
    harness = check(eager_of_any_length, *inputs(), dynamic=True)
    assert harness.report.attention == Counter({WRITTEN_OUT: 1})


def eager_of_any_length(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    "function",
    [
        sdpa,
        lambda q, k, v: (q @ k.mT).sigmoid() @ v,  # another function of the scores
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,  # of columns
        lambda q, k, v: (q @ k.mT) @ v.softmax(-1),  # of values
        lambda q, k, v: (q.square() @ k.mT).softmax(-1),  # weights that meet no values
        lambda q, k, v: q.softmax(-1) @ k.mT @ v,  # linear attention
        lambda q, k, v: (q[..., 0] * k.sum(-1)).softmax(-1)[..., None, :] @ v,  # pooling
    ],
)
def test_what_is_none(function):
    harness = check_gradients(function, *inputs())
    assert not {MATH, WRITTEN_OUT} & set(harness.report.attention)
    assert not told(harness)
