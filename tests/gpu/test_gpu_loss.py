# SPDX-License-Identifier: Apache-2.0
"""Loss and lookup of a vocabulary on a GPU: their gradients beside torch.compile's error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from layers import SLACK, compiled, errors
from torch._dynamo.utils import counters
from zoo.heads import Head, Tied

from coda_inductor.dynamo import late_gradients
from coda_inductor.mainloop.dlogits import dlogits
from coda_inductor.runtime import linear_cross_entropy
from coda_inductor.semantic.loss import cross_entropy_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

D, V = 256, 4096


def make(vocabulary: int, bias: bool = False, cap: float = 0.0, z: float = 0.0) -> Head:
    def ended(logits, labels):
        if cap:
            logits = cap * torch.tanh(logits / cap)
        loss = F.cross_entropy(logits.float().view(-1, vocabulary), labels, ignore_index=-100)
        if z:
            loss = loss + z * torch.logsumexp(logits.float(), -1).square().mean()
        return loss, logits

    torch.manual_seed(0)
    how = {"width": D, "vocabulary": vocabulary, "between": torch.add, "body_bias": False}
    return Head(ended, torch.float32, bias, **how).cuda().bfloat16()


def inputs(rows: int, vocabulary: int):
    torch.manual_seed(1)
    x = torch.randn(1, rows, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[::5] = -100
    return x, labels


def gradients(call, model, x, labels):
    loss, logits = call(x, labels)
    grads = torch.autograd.grad(loss, [x, *model.parameters()])
    return [loss.reshape(1), logits, *grads]


@pytest.fixture
def slices(monkeypatch):
    """Let logits count as large, and be cut in slices of 512 columns."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 2**14)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)


HEADS = [
    *[(rows, vocabulary, {}) for rows in (8, 120, 1000) for vocabulary in (V, V - 40)],
    *[(120, V, how) for how in ({"bias": True}, {"cap": 1.5}, {"z": 0.1})],
    (120, V, {"bias": True, "cap": 1.5, "z": 0.1}),
]


@pytest.mark.parametrize(("rows", "vocabulary", "head"), HEADS)
def test_gradients_are_no_worse_than_torch_compiles(rows, vocabulary, head, slices):
    model, (x, labels) = make(vocabulary, **head), inputs(rows, vocabulary)
    wide = copy.deepcopy(model).float()
    exact = gradients(wide, wide, x.detach().float().requires_grad_(), labels)
    stock = copy.deepcopy(model)
    theirs = errors(gradients(torch.compile(stock), stock, x, labels), exact)
    mine = errors(gradients(compiled(model, strict=True), model, x, labels), exact)
    assert torch._dynamo.utils.counters["coda"]["cross_entropy_backward"] == 1
    assert torch._dynamo.utils.counters["coda"]["cross_entropy"] == 1
    # The loss is one number, and off by what its few targets' logits are rounded by.
    assert mine[0] <= 2**-9, (mine, theirs)
    for ours, other in zip(mine[1:], theirs[1:], strict=True):
        assert ours <= SLACK * other, (mine, theirs)


def test_a_step_needs_less_memory_than_a_second_tensor_of_logits(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 2**22)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)
    model, (x, labels) = make(65536), inputs(2048, 65536)
    peaks = {}
    for name, call in (("ours", compiled(model, strict=True)), ("theirs", torch.compile(model))):
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
    assert peaks["ours"] < peaks["theirs"] - logits


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
    got = dlogits(rows, *columns, target, lse, scale, scale * z if z else None, smoothing, cap)
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
    args = (one, rows, target, lse, one, w, x, None, -100, 0.0, "sum", 0.0, False)
    dx, dw, _ = torch.ops.coda_inductor.linear_cross_entropy_backward(*args)
    torch.testing.assert_close(dx, want @ w, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dw, want.T @ x, rtol=1e-10, atol=1e-10)


T = 1024


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("words", [3, 50, V])
def test_rows_of_one_token_are_added_once(tied, words):
    """As exact as torch.compile, which adds in float32 and rounds once, however often a token
    stands: a place that were added twice, or lost, would be off by far more."""
    torch.manual_seed(0)
    exact, model = (
        Tied(dtype, rows=V, width=D, tied=tied).cuda() for dtype in (torch.float64, torch.bfloat16)
    )
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(words, (1, T), device="cuda")

    def gradient(call, own):
        y = call(tokens)
        torch.manual_seed(1)
        up = torch.randn(y.shape, device="cuda").bfloat16().to(y.dtype)
        return torch.autograd.grad(y, [own.weight], up)[0].double()

    ours = gradient(compiled(model, gate="always"), model)
    assert counters["coda"]["embedding_backward"] == 1
    torch._dynamo.reset()
    theirs = gradient(torch.compile(model), model)
    want = gradient(exact, exact)
    assert (ours - want).norm() <= 1.2 * (theirs - want).norm()
