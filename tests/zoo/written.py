# SPDX-License-Identifier: Apache-2.0
"""Modules that write to a buffer or an input whose old value their backward pass needs.

Eager keeps the old value: it was copied, or what was computed from it is kept. A compiler that
computes that again in the backward pass reads the new value, and trains with wrong gradients.
``python tools/writes.py`` prints a table of both.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D, N = 16, 24
#: Name -> a module.
ALL: dict[str, Callable[[], nn.Module]] = {}


class Written(nn.Module):
    """Calls ``function`` of itself and of x (N, D). ``state``: what is written to."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int):
        super().__init__()
        self.function, self.linear = function, nn.Linear(D, D)
        self.register_buffer("state", torch.rand(*shape) + 0.5)

    def write(self, new: torch.Tensor) -> None:
        with torch.no_grad():
            self.state.copy_(new)

    def forward(self, x):
        return self.function(self, x)


def writes(*shape: int) -> Callable[..., Any]:
    """Make the function a module with a state of this shape."""

    def decorate(function):
        ALL[function.__name__] = made = functools.partial(Written, function, *shape)
        made.__doc__ = function.__doc__
        return function

    return decorate


@writes(D, N)
def queue(model, x):
    """Contrast with a queue of keys that takes the newest (MoCo, arXiv 1911.05722, algorithm 1)."""
    logits = model.linear(x) @ model.state.clone().detach()
    model.write(torch.cat([x.detach().t()[:, :8], model.state[:, :-8]], 1))
    return F.cross_entropy(logits, torch.arange(N, device=x.device))


@writes(D, D)
def cast(model, x):
    """A product with a moving average, under another dtype: the cast is a copy."""
    y = F.silu(model.linear(x).float() @ model.state.float())
    model.write(model.state * 0.5)
    return y


@writes(1, D)
def center(model, x):
    """A teacher's scores less their moving average (DINO, arXiv 2104.14294, algorithm 1)."""
    teacher = ((x - model.state) / 0.04).softmax(-1)
    loss = -(teacher * model.linear(x).log_softmax(-1)).sum(-1).mean()
    model.write(model.state * 0.9 + x.mean(0, keepdim=True) * 0.1)
    return loss


@writes(N, D)
def slices(model, x):
    """A buffer that is read by columns: what ``cat`` joins again is a copy."""
    whole = torch.cat([model.state[:, :8], model.state[:, 8:]], 1)
    y = model.linear(x) * whole
    model.write(y.detach())
    return y


@writes(2 * N, D)
def rows(model, x):
    """A part of a buffer, which alone is written to."""
    y = model.linear(x) * model.state[:N].cos()
    with torch.no_grad():
        model.state[:N].mul_(2)
    return y


@writes(D, D)
def frozen(model, x):
    """A frozen layer in front of a parameter; its input is scaled in place."""
    y = torch.tanh(F.linear(x, model.state)) * model.linear.bias
    x.mul_(2)
    return y


@writes(D)
def gate(model, x):
    """A bias of a router, moved by the load (arXiv 2408.15664); the gates read the old one."""
    scores = model.linear(x).sigmoid() * model.state.tanh()
    top = (scores + model.state).topk(2, -1).indices
    load = F.one_hot(top, D).sum((0, 1)).to(x.dtype)
    y = scores.gather(-1, top) * 2
    model.write(model.state + 0.1 * (load.mean() - load).sign())
    return y


@writes(N, D)
def loop(model, x):
    """A table of an earlier call, which this call replaces and also returns."""
    old = model.state * 1
    y = model.linear(x) * old.exp()
    model.write(x.detach())
    return y + model.state


def step(name: str, compile_: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    """Output, all that was written to, and the gradients, of one step."""
    torch.manual_seed(0)
    model, x = ALL[name]().double(), torch.randn(N, D, dtype=torch.float64)
    y = compile_(model)(x)
    (y.sin().sum() if y.dim() else y).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), x, *model.buffers(), *gradients]
