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

    def decorate(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
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


@writes(N, D)
def codebook(model, x):
    """Nearest codes, and their moving average (VQ-VAE, arXiv 1711.00937, appendix A.1)."""
    x = model.linear(x)
    nearest = torch.cdist(x.detach(), model.state).argmin(-1)
    loss = (x - model.state[nearest]).pow(2).mean()
    hits = F.one_hot(nearest, N).to(x.dtype)
    model.write(model.state * 0.9 + 0.1 * hits.t() @ x.detach())
    return loss


@writes(D, D)
def head(model, x):
    """A product with a moving average of the layer's own weight, in the layer's dtype."""
    y = F.silu(F.linear(model.linear(x), model.state.to(torch.float64).clone()))
    model.write(torch.lerp(model.state, model.linear.weight, 0.1))
    return y


@writes(D, D)
def cast(model, x):
    """The same under another dtype: the cast is a copy."""
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


@writes(2, D)
def renorm(model, x):
    """Batch renormalization by running statistics (arXiv 1702.03275, algorithm 1)."""
    x = model.linear(x)
    mean, std = x.mean(0), x.std(0)
    r, d = std.detach() / model.state[1], (mean.detach() - model.state[0]) / model.state[1]
    y = (x - mean) / std * r + d
    model.write(torch.lerp(model.state, torch.stack([mean, std]).detach(), 0.1))
    return y.sigmoid()


@writes(1)
def warmup(model, x):
    """A factor that depends on the number of calls."""
    y = model.linear(x) * (1 - (-model.state).exp())
    model.write(model.state + 1)
    return y


@writes(1)
def temperature(model, x):
    """Attention whose temperature anneals."""
    y = (model.linear(x) / model.state.exp()).softmax(-1)
    model.write(model.state * 0.9)
    return y


@writes(2)
def observer(model, x):
    """Quantization with a straight-through gradient, in the range that was seen before."""
    x = model.linear(x)
    scale = (model.state[0] + model.state[1]) / 255
    low = x / scale
    y = (low + (low.round() - low).detach()) * scale
    model.write(torch.stack([x.detach().abs().amax(), x.detach().abs().mean()]))
    return y.sin()


@writes(2)
def pop_art(model, x):
    """Targets that running moments normalize."""
    y = model.linear(x)
    loss = ((y - model.state[0]) / model.state[1].sqrt()).pow(3).mean()
    model.write(torch.stack([x.mean(), x.var()]))
    return loss


@writes(N, D)
def state(model, x):
    """A recurrent state that the next call reads."""
    h = torch.tanh(model.linear(x) * model.state.sigmoid())
    model.write(h.detach())
    return h


@writes(D)
def class_weights(model, x):
    """A loss weighted by how often each class was seen."""
    labels = x.detach().argmax(-1)
    loss = F.cross_entropy(model.linear(x), labels, reduction="none") / (1 + model.state)[labels]
    model.write(model.state + F.one_hot(labels, D).sum(0))
    return loss.mean()


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


@writes(D)
def zeroed(model, x):
    """An accumulator that is used and zeroed."""
    y = model.linear(x) * (model.state * 3)
    model.state.zero_()
    return y


@writes(1)
def refilled(model, x):
    """An input without gradient that is filled again for the next call."""
    y = torch.tanh(model.linear(x.exp()))
    x.zero_()
    return y


class Frozen(Written):
    """A frozen layer in front of a parameter; its input is scaled in place."""

    def __init__(self):
        super().__init__(lambda *_: None, 1)
        self.frozen = nn.Linear(D, 2 * D).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(2 * D))
        self.out = nn.Linear(2 * D, D)

    def forward(self, x):
        y = self.out(torch.tanh(self.frozen(x)) * self.scale)
        x.mul_(2)
        return y


ALL["frozen"] = Frozen


@writes(1)
def residual(model, x):
    """A stream that a block adds to in place, from a copy of it."""
    y = model.linear(torch.cat([x[:3], x[3:]]).sigmoid() * 2)
    x.add_(y.detach())
    return y * y


@writes(D)
def gate(model, x):
    """A bias of a router, moved by the load (arXiv 2408.15664); the gates read the old one."""
    scores = model.linear(x).sigmoid() * model.state.tanh()
    top = (scores + model.state).topk(2, -1).indices
    load = F.one_hot(top, D).sum((0, 1)).to(x.dtype)
    y = scores.gather(-1, top) * 2
    model.write(model.state + 0.1 * (load.mean() - load).sign())
    return y


@writes(D)
def norm(model, x):
    """A norm whose weight is a moving average."""
    y = model.linear(F.rms_norm(model.linear(x), (D,)) * (1 + model.state))
    model.write(model.state * 0.5)
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
