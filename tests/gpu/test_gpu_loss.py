# SPDX-License-Identifier: Apache-2.0
"""The gradient of logits on a GPU: its memory, and the kernel that makes a slice of it."""

import pytest
import torch
from layers import compiled
from test_gpu_exact import D, head

from coda_inductor.dynamo import late_gradients
from coda_inductor.mainloop.dlogits import dlogits
from coda_inductor.semantic.loss import cross_entropy_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


@pytest.mark.parametrize("returned", [True, False])
def test_a_step_needs_less_memory_than_a_second_tensor_of_logits(returned, monkeypatch):
    """Or no more than torch.compile, which overwrites logits that nobody else has."""
    monkeypatch.setattr("coda_inductor.semantic.loss.SLICE_BYTES", 2**22)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)
    model, (x, labels) = head(2048, 65536)
    model.cuda().bfloat16()
    x, labels = x.cuda().bfloat16().requires_grad_(), labels.cuda()

    def function(x, labels):
        loss, logits = model(x, labels)
        return (loss, logits) if returned else (loss,)

    ways = {"ours": compiled(function, strict=True), "theirs": torch.compile(function)}
    peaks = {}
    for name, call in ways.items():
        for _ in range(2):
            call(x, labels)[0].backward()
            model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(x, labels)[0].backward()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        model.zero_grad()
    logits = 2048 * 65536 * 2
    assert peaks["ours"] < 1.5 * logits + 2 * 65536 * D * 2
    assert peaks["ours"] < peaks["theirs"] - logits * returned + 2**20


@pytest.mark.parametrize(("cap", "z"), [(0.0, 0.0), (5.0, 0.0), (5.0, 0.2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [(0, 1000), (512, 1536), (1000, 3001)])
def test_slice_of_the_logits_gradient(columns, smoothing, cap, z):
    torch.manual_seed(0)
    rows = torch.randn(37, 3001, device="cuda").bfloat16() * 3
    if cap:
        rows = cap * torch.tanh(rows / cap)
    target = torch.randint(3001, (37,), device="cuda")
    target[3] = -100
    lse, one = torch.logsumexp(rows.float(), -1), torch.ones((), device="cuda")
    scale = torch.where(target == -100, 0.0, one * 0.3)
    got = dlogits(
        rows, *columns, target, lse, scale, scale * z if z else None, None, smoothing, cap
    )
    how = (target, lse, one, -100, smoothing, "sum")
    want = cross_entropy_backward(one * 0.3, rows.double(), *how)
    if z:
        want = want + (scale * z)[:, None] * torch.exp(rows.double() - lse[:, None])
    if cap:
        want = want * (1 - (rows.double() / cap) ** 2)
    want = want[:, slice(*columns)]
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-2, atol=1e-5)


def test_a_slice_of_float64_logits_stays_float64():
    rows = torch.randn(5, 300, device="cuda", dtype=torch.float64)
    target, lse = torch.arange(5, device="cuda"), torch.logsumexp(rows, -1)
    one = torch.ones((), device="cuda", dtype=torch.float64)
    x, w = torch.randn_like(rows[:, :16]), torch.randn(300, 16, device="cuda", dtype=torch.float64)
    how = (target, lse, one, -100, 0.0, "sum")
    want = cross_entropy_backward(one, rows, *how)
    args = (one, rows, target, lse, one, w, x, None, None, None, -100, 0.0, "sum", 0.0, False)
    dx, dw, _ = torch.ops.coda_inductor.linear_cross_entropy_backward(*args)
    torch.testing.assert_close(dx, want @ w, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dw, want.T @ x, rtol=1e-10, atol=1e-10)
