# SPDX-License-Identifier: Apache-2.0
"""The gradient of logits on a GPU: its memory, and the kernel that makes a slice of it."""

import functools
from types import SimpleNamespace

import pytest
import torch
from layers import SLACK, compiled, errors
from test_gpu_exact import D, head

from coda_inductor import lm_head, reports, token_log_probs
from coda_inductor.dynamo import late_gradients
from coda_inductor.mainloop.dlogits import dlogits
from coda_inductor.semantic import loss as semantic
from coda_inductor.semantic.loss import cross_entropy_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def test_a_step_needs_less_memory_than_a_second_tensor_of_logits(monkeypatch):
    """Which torch.compile has where logits are returned."""
    monkeypatch.setattr("coda_inductor.semantic.loss.SLICE_BYTES", 2**22)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)
    model, (x, labels) = head(2048, 65536)
    model.cuda().bfloat16()
    x, labels = x.cuda().bfloat16().requires_grad_(), labels.cuda()
    call = compiled(model, strict=True)
    for _ in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(x, labels)[0].backward()
        peak = torch.cuda.max_memory_allocated() - before
    logits = 2048 * 65536 * 2
    assert peak < 1.5 * logits + 2 * 65536 * D * 2


def test_the_function_that_compiles_itself(monkeypatch):
    """As exact as torch's ops in eager, in one kernel forward, for any number of tokens, and
    without gradients. Eager rounds logits before they are scaled, and we after it: by other factors
    than powers of two their 16 bits are up to 1.4 times as coarse, or as fine."""
    options = {"gate": "always", "strict": True}
    call = functools.partial(torch.compile, options=options)
    monkeypatch.setattr(lm_head, "torch", SimpleNamespace(**vars(torch) | {"compile": call}))
    lm_head._compiled.cache_clear()
    torch.manual_seed(1)
    w = (torch.randn(4104, 264, device="cuda") / 4).bfloat16()

    def outcome(dtype, x, targets, compiles):
        monkeypatch.setattr(lm_head, "_compiles", lambda _: compiles)
        given = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
        found = token_log_probs(*given, targets, temperature=0.5, entropy=True)
        (found[0].sum() - 0.5 * found[1].mean()).backward()
        return [*(t.detach() for t in found), *(t.grad for t in given)]

    for rows in (37, 300, 512):
        x = torch.randn(rows, 264, device="cuda").bfloat16()
        targets = torch.randint(4104, (rows,), device="cuda")
        exact = outcome(torch.float64, x, targets, compiles=False)
        theirs, ours = (
            errors(outcome(torch.bfloat16, x, targets, c), exact) for c in (False, True)
        )
        assert all(mine <= SLACK * e + 1e-6 for mine, e in zip(ours, theirs, strict=True))
    assert len(reports()) == 2, "the second number of tokens is any"
    for graph in reports():
        kernels = [s.program for s in graph.sites if s.how == "kernel"]
        assert {"logsumexp", "entropy"} <= {r.combine for p in kernels for r in p.reduces}
    with torch.no_grad():
        alone = token_log_probs(x, w, targets, temperature=0.5, entropy=True)
    ours = errors(alone, exact[:2])
    assert all(mine <= SLACK * e + 1e-6 for mine, e in zip(ours, theirs[:2], strict=True))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(
    ("smoothing", "cap", "z"), [(0.0, 0.0, 0.0), (0.1, 5.0, 0.0), (0.1, 5.0, 0.2)]
)
@pytest.mark.parametrize("columns", [(0, 1000), (1000, 3001)])
def test_slice_of_the_logits_gradient(columns, smoothing, cap, z, spread):
    torch.manual_seed(0)
    rows = torch.randn(37, 3001, device="cuda").bfloat16() * 3
    if cap:
        rows = cap * torch.tanh(rows / cap)
    target = torch.randint(3001, (37,), device="cuda")
    target[3] = -100
    lse, one = torch.logsumexp(rows.float(), -1), torch.ones((), device="cuda")
    scale = torch.where(target == -100, 0.0, one * 0.3)
    entropy = semantic.entropy(rows, torch.float32)[2]
    spread = (torch.randn(37, device="cuda"), entropy) if spread else None
    terms = scale * z if z else None, spread
    got = dlogits(rows, *columns, target, lse, scale, *terms, smoothing, cap)
    how = (target, lse, one, -100, smoothing, "sum")
    want = cross_entropy_backward(one * 0.3, rows.double(), *how)
    if z:
        want = want + (scale * z)[:, None] * torch.exp(rows.double() - lse[:, None])
    if spread:
        dy, (_, lse64, wide) = spread[0], semantic.entropy(rows.double(), torch.float64)
        want = want + semantic.entropy_backward(dy.double(), rows.double(), lse64, wide)
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
