"""Rules at the edge of what they are good for: nothing has more than 1.2 times the error of the
worse of eager and torch.compile, in bfloat16, against float64.

Programs run with the kernels' numerics here, too: products are not rounded before their epilogue.
Inputs are those at which a rewrite that rounds elsewhere could lose digits: confident logits, row
means far from zero, weights with one large singular value, outlier channels.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import randn
from harness import Harness, Stock
from torch import nn

D, HIDDEN, ROWS, V = 128, 256, 64, 512
SLACK = 1.2


def outcome(call, model, inputs, dtype, tangent):
    """The result, and the gradients of inputs and parameters, in float64."""
    inputs = [x.to(dtype).clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = call(*inputs)
    if tangent is None:
        tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    out.backward(tangent.to(out.dtype))
    leaves = [*inputs, *model.parameters()]
    return [out.detach().double(), *(t.grad.double() for t in leaves if t.grad is not None)]


def hold(model, *inputs, tangent=None):
    """Compare ``model`` in bfloat16 with itself in float64; returns our harness."""
    exact, model = copy.deepcopy(model.bfloat16()).double(), model.bfloat16()
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    want = outcome(exact, exact, inputs, torch.float64, tangent)
    errors = []
    harness = Harness()
    for backend in (None, Stock(), harness):
        copied = copy.deepcopy(model)
        call = copied if backend is None else lambda *a, b=backend, c=copied: b.train(c, *a)
        have = outcome(call, copied, inputs, torch.bfloat16, tangent)
        errors.append([(h - w).norm() for h, w in zip(have, want, strict=True)])
    for i, (eager, stock, ours) in enumerate(zip(*errors, strict=True)):
        # One number may be right by luck: a loss is held to bfloat16's precision at the most.
        floor = (4e-3 if want[i].dim() == 0 else 1e-6) * want[i].norm()
        worst = max(eager, stock)
        assert ours <= SLACK * worst + floor, f"{i}: {ours:.3e}, theirs {eager:.3e} {stock:.3e}"
    return harness


class Head(nn.Module):
    def __init__(self, cap=0.0):
        super().__init__()
        self.body, self.head, self.cap = nn.Linear(D, D), nn.Linear(D, V, bias=False), cap

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return F.cross_entropy(logits.float(), labels)


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("confidence", [1, 8, 11, 14])
def test_loss_of_confident_tokens(confidence, cap):
    """At 14 the loss is 0.001: what is left of p - 1 must not be the rounding of a logit. Beyond,
    at 1e-5, float32 itself cannot tell a log-sum-exp of 20 from its logit (docs/patterns.md)."""
    model, labels = Head(cap), torch.arange(ROWS) * 7 % V
    with torch.no_grad():
        model.body.weight.copy_(torch.eye(D))
        x = randn(ROWS, D)
        x = x / x.norm(dim=-1, keepdim=True)
        model.head.weight[labels] += (confidence * x).float()  # its target's logit is raised
    harness = hold(model, x, labels)
    assert harness.counts["cross_entropy"] == 1


class Stream(nn.Module):
    """Two LayerNorms in a residual stream, whose update has a row mean."""

    def __init__(self, mean):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.o, self.up, self.down = nn.Linear(D, D), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        with torch.no_grad():
            self.o.bias += mean

    def forward(self, x, y):
        x = x + self.o(self.n1(x) * y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize("mean", [0, 10, 100, 1000])
def test_layer_norm_after_an_update_with_a_large_mean(mean, start):
    harness = hold(Stream(mean), randn(ROWS, D) + start, randn(ROWS, D))
    assert harness.counts["layer_norm"] == harness.counts["layer_norm_backward"] == 1


@pytest.mark.parametrize("mean", [0, 1000])
def test_layer_norm_in_float32_is_left_alone(mean):
    model, (x, y) = Stream(mean), (randn(ROWS, D).float(), randn(ROWS, D).float())
    harness = Harness()
    ours = harness.run(model, x, y)
    stock = Stock().run(model, x, y)
    exact = copy.deepcopy(model).double()(x.double(), y.double())
    assert harness.counts["layer_norm"] == 0
    assert any("float32: where a row's mean is large" in m for m in harness.report.near_misses)
    assert (ours - exact).norm() <= SLACK * (stock - exact).norm()


def test_layer_norm_with_a_wide_term_in_the_stream_is_left_alone():
    """Nothing rounds a float32 constant to 16 bits but the shifted operand would."""

    class Wide(Stream):
        def forward(self, x, y):
            x = x.float()
            x = x + self.o(self.n1(x.bfloat16()) * y).float() + 1000.0 * torch.ones(D)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(F.layer_norm(x, (D,), self.n1.weight.float()), self.up.weight)

    model = Wide(0).bfloat16()
    harness = Harness()
    x, y = randn(ROWS, D).bfloat16(), randn(ROWS, D).bfloat16()
    ours = harness.run(model, x, y)
    assert harness.counts["layer_norm"] == 0
    with torch.no_grad():
        torch.testing.assert_close(ours, model(x, y), rtol=0.1, atol=0.1)


def ill_conditioned(linear, singular):
    """One singular value is about ``singular`` times as large as the others; returns its output's
    direction."""
    n, d = linear.weight.shape
    left, right = F.normalize(randn(n), dim=0), F.normalize(randn(d), dim=0)
    with torch.no_grad():
        linear.weight.copy_(randn(n, d) / d**0.5 + singular * torch.outer(left, right))
    return left


class Normed(nn.Module):
    """RMSNorm in a residual stream, and what reads it."""

    def __init__(self, kind, singular):
        super().__init__()
        self.kind, self.o, self.norm = kind, nn.Linear(D, D, bias=False), nn.RMSNorm(D, eps=1e-5)
        names, width = (("q", "k", "v"), D) if kind == "attention" else (("gate", "up"), HIDDEN)
        for name in names[: 1 if kind == "linear" else 3]:
            setattr(self, name, nn.Linear(D, width, bias=False))
        for name in ("gate", "up", "v"):
            if hasattr(self, name):
                self.direction = ill_conditioned(getattr(self, name), singular)
        if kind != "linear":
            self.down = nn.Linear(width, D, bias=False)

    def forward(self, x, y):
        x = x + self.o(y)
        n = self.norm(x)
        if self.kind == "linear":
            return self.gate(n)
        if self.kind == "two":
            return x + self.down(self.gate(n) + self.up(n))
        if self.kind == "swiglu":
            return x + self.down(F.silu(self.gate(n)) * self.up(n))
        q, k, v = (
            p(n).view(2, ROWS // 2, 4, D // 4).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(a.transpose(1, 2).reshape(ROWS, D))


EDGES = [(kind, s) for kind in ("linear", "two", "attention") for s in (1, 100, 1000)]
EDGES += [("swiglu", 1), ("swiglu", 100)]  # at 1000 gates are all or nothing: a few values decide


@pytest.mark.parametrize(("kind", "singular"), EDGES)
def test_norm_before_an_ill_conditioned_weight(kind, singular):
    """Rule R3, and the row scale on dz: where the gradient comes from outside, it has nothing of
    the weight's main direction."""
    model, tangent = Normed(kind, singular), None
    if kind == "linear":
        tangent = randn(ROWS, HIDDEN)
        tangent -= torch.outer(tangent @ model.direction, model.direction)
        tangent = tangent.bfloat16()
    harness = hold(model, randn(ROWS, D), randn(ROWS, D), tangent=tangent)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == 1


def test_outlier_channels():
    """Three channels a thousand times as large as the rest, as trained models have them."""
    x, model = randn(ROWS, D), Normed("swiglu", 1)
    x[:, 5::50] *= 1000
    hold(model, x, randn(ROWS, D))


@pytest.mark.parametrize("kind", ["linear", "swiglu", "attention"])
def test_rows_of_zeros_and_of_infinity(kind):
    """What is not finite in eager is not finite here, and nothing else."""
    x, y, model = randn(ROWS, D).bfloat16(), randn(ROWS, D).bfloat16(), Normed(kind, 1).bfloat16()
    x[3], y[3] = 0, 0
    x[ROWS - 5, 2], x[ROWS - 9, 3] = float("inf"), float("nan")
    ours = Harness().run(model, x, y)
    with torch.no_grad():
        assert torch.equal(ours.isfinite(), model(x, y).isfinite())
