# SPDX-License-Identifier: Apache-2.0
"""Models at the edge of what a rewrite is good for, and how their errors are held to others'.

Shared by the tests of the passes, on a CPU, and of kernels, on a GPU. Inputs are those at which a
rewrite that rounds elsewhere could lose digits: confident logits, row means far from zero, weights
with one large singular value, outlier channels.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from checking import randn
from torch import nn
from torch.utils._pytree import tree_leaves

from zoo.heads import Head

#: Our error is at most that of the worse of eager and torch.compile, times this.
SLACK = 1.2


def outcome(call, model, inputs, dtype, tangent, training, leading=None):
    """The results, and in training the gradients of inputs and parameters, in float64: of all
    results, or of the ``leading`` ones."""
    inputs = [x.to(dtype).clone() if x.is_floating_point() else x for x in inputs]
    if not training:
        with torch.no_grad():
            return [y.double() for y in tree_leaves(call(*inputs))]
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    outs = tree_leaves(call(*inputs))
    generator = torch.Generator().manual_seed(7)
    tangents = [torch.randn(y.shape, generator=generator).bfloat16() for y in outs]
    tangents = tangents if tangent is None else [tangent]
    tangents = [t.to(y.device, y.dtype) for t, y in zip(tangents, outs, strict=True)]
    torch.autograd.backward(outs[:leading], tangents[:leading])
    leaves = [*inputs, *model.parameters()]
    found = [*(y.detach() for y in outs), *(t.grad for t in leaves if t.grad is not None)]
    return [t.double() for t in found]


def hold(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    compilers: Sequence[Callable[[nn.Module], Callable[..., Any]]],
    tangent: torch.Tensor | None = None,
    training: bool = True,
    *,
    dtype: torch.dtype = torch.bfloat16,
    leading: int | None = None,
    parameters: torch.dtype | None = None,
    noise: float = 1e-6,
) -> None:
    """Compare ``model`` in ``dtype`` (its ``parameters`` may have another one) with itself in
    float64: in eager, and as each of ``compilers`` makes it callable, ours being the last. A
    relative error of ``noise`` is none."""
    model = model.to(parameters or dtype)
    exact = copy.deepcopy(model).double()
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    how = {"tangent": tangent, "training": training, "leading": leading}
    want = outcome(exact, exact, inputs, torch.float64, **how)
    errors = []
    for compiler in (None, *compilers):
        copied = copy.deepcopy(model)
        call = copied if compiler is None else compiler(copied)
        have = outcome(call, copied, inputs, parameters or dtype, **how)
        errors.append([(h - w).norm() for h, w in zip(have, want, strict=True)])
    *theirs, ours = errors
    for i, error in enumerate(ours):
        # One number may be right by luck: a loss is held to the precision of 16 bits at the most.
        floor = (max(4e-3, noise) if want[i].numel() == 1 else noise) * want[i].norm()
        worst = max(each[i] for each in theirs)
        assert error <= SLACK * worst + floor, f"{i}: {error:.3e}, theirs at most {worst:.3e}"


def confident(
    confidence: float, *, d: int, rows: int, vocabulary: int, cap: float = 0.0
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A head, x (rows, d), and labels (rows,) whose logits are raised by ``confidence``."""

    def loss(logits, labels):
        logits = torch.tanh(logits / cap) * cap if cap else logits
        return F.cross_entropy(logits.float(), labels)

    how = {"width": d, "vocabulary": vocabulary, "between": lambda x, y: y}
    model, labels = Head(loss, torch.float32, **how), torch.arange(rows) * 7 % vocabulary
    x = F.normalize(randn(rows, d), dim=-1)
    with torch.no_grad():
        model.body.weight.copy_(torch.eye(d))
        model.head.weight[labels] += (confidence * x).float()
    return model, x, labels


def ill_conditioned(linear, singular):
    """One singular value is about ``singular`` times the others; returns its output's direction."""
    n, d = linear.weight.shape
    left, right = F.normalize(randn(n), dim=0), F.normalize(randn(d), dim=0)
    with torch.no_grad():
        linear.weight.copy_(randn(n, d) / d**0.5 + singular * torch.outer(left, right))
    return left


class Normed(nn.Module):
    """RMSNorm in a residual stream, and what reads it."""

    def __init__(self, kind: str, singular: float, d: int, hidden: int):
        super().__init__()
        self.kind, self.o, self.norm = kind, nn.Linear(d, d, bias=False), nn.RMSNorm(d, eps=1e-5)
        names, width = (("q", "k", "v"), d) if kind == "attention" else (("gate", "up"), hidden)
        for name in names[: 1 if kind == "linear" else 3]:
            setattr(self, name, nn.Linear(d, width, bias=False))
        for name in ("gate", "up", "v"):
            if hasattr(self, name):
                self.direction = ill_conditioned(getattr(self, name), singular)
        if kind != "linear":
            self.down = nn.Linear(width, d, bias=False)

    def forward(self, x, y):
        x = x + self.o(y)
        n = self.norm(x)
        if self.kind == "linear":
            return self.gate(n)
        if self.kind == "swiglu":
            return x + self.down(F.silu(self.gate(n)) * self.up(n))
        m, d = x.shape
        q, k, v = (
            p(n).view(2, m // 2, d // 32, 32).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(a.transpose(1, 2).reshape(m, d))


#: (kind of :class:`Normed`, singular value).
SINGULAR = [(kind, s) for kind in ("linear", "attention") for s in (1, 100, 1000)]
SINGULAR += [("swiglu", 1), ("swiglu", 100)]  # at 1000 gates are all or nothing: a few decide


def across(model: Normed, rows: int, hidden: int) -> torch.Tensor | None:
    """A gradient from outside that has nothing of the weight's main direction, (rows, hidden);
    None where the model's own layers make it."""
    if model.kind != "linear":
        return None
    tangent = randn(rows, hidden)
    return (tangent - torch.outer(tangent @ model.direction, model.direction)).bfloat16()
