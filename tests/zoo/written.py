# SPDX-License-Identifier: Apache-2.0
"""Modules that write to a buffer or an input whose old value their backward pass needs.

Eager keeps the old value: it was copied, or what was computed from it is kept. A compiler that
computes that again in the backward pass reads the new value, and trains with wrong gradients.
``python tools/writes.py`` prints a table of both.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D, N = 16, 24


class Written(nn.Module):
    """``state``: what is written to. Calls are ``forward(x)``, x (N, D)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("state", torch.rand(*shape) + 0.5)

    def write(self, new: torch.Tensor) -> None:
        with torch.no_grad():
            self.state.copy_(new)


class Queue(Written):
    """Contrast with a queue of keys that takes the newest (MoCo, arXiv 1911.05722, algorithm 1)."""

    def __init__(self):
        super().__init__(D, N)

    def forward(self, x):
        logits = self.linear(x) @ self.state.clone().detach()
        self.write(torch.cat([x.detach().t()[:, :8], self.state[:, :-8]], 1))
        return F.cross_entropy(logits, torch.arange(N, device=x.device))


class Codebook(Written):
    """Nearest codes, and their moving average (VQ-VAE, arXiv 1711.00937, appendix A.1)."""

    def __init__(self):
        super().__init__(N, D)

    def forward(self, x):
        x = self.linear(x)
        nearest = torch.cdist(x.detach(), self.state).argmin(-1)
        loss = (x - self.state[nearest]).pow(2).mean()
        hits = F.one_hot(nearest, N).to(x.dtype)
        self.write(self.state * 0.9 + 0.1 * hits.t() @ x.detach())
        return loss


class Head(Written):
    """A product with a moving average of the layer's own weight, in the layer's dtype."""

    def __init__(self):
        super().__init__(D, D)

    def forward(self, x):
        y = F.silu(F.linear(self.linear(x), self.state.to(torch.float64).clone()))
        self.write(torch.lerp(self.state, self.linear.weight, 0.1))
        return y


class Cast(Written):
    """The same under another dtype: the cast is a copy."""

    def __init__(self):
        super().__init__(D, D)

    def forward(self, x):
        y = F.silu(self.linear(x).float() @ self.state.float())
        self.write(self.state * 0.5)
        return y


class Center(Written):
    """A teacher's scores less their moving average (DINO, arXiv 2104.14294, algorithm 1)."""

    def __init__(self):
        super().__init__(1, D)

    def forward(self, x):
        teacher = ((x - self.state) / 0.04).softmax(-1)
        loss = -(teacher * self.linear(x).log_softmax(-1)).sum(-1).mean()
        self.write(self.state * 0.9 + x.mean(0, keepdim=True) * 0.1)
        return loss


class Renorm(Written):
    """Batch renormalization by running statistics (arXiv 1702.03275, algorithm 1)."""

    def __init__(self):
        super().__init__(2, D)

    def forward(self, x):
        x = self.linear(x)
        mean, std = x.mean(0), x.std(0)
        r, d = std.detach() / self.state[1], (mean.detach() - self.state[0]) / self.state[1]
        y = (x - mean) / std * r + d
        self.write(torch.lerp(self.state, torch.stack([mean, std]).detach(), 0.1))
        return y.sigmoid()


class Warmup(Written):
    """A factor that depends on the number of calls."""

    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        y = self.linear(x) * (1 - (-self.state).exp())
        self.write(self.state + 1)
        return y


class Temperature(Written):
    """Attention whose temperature anneals."""

    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        y = (self.linear(x) / self.state.exp()).softmax(-1)
        self.write(self.state * 0.9)
        return y


class Observer(Written):
    """Quantization with a straight-through gradient, in the range that was seen before."""

    def __init__(self):
        super().__init__(2)

    def forward(self, x):
        x = self.linear(x)
        scale = (self.state[0] + self.state[1]) / 255
        low = x / scale
        y = (low + (low.round() - low).detach()) * scale
        self.write(torch.stack([x.detach().abs().amax(), x.detach().abs().mean()]))
        return y.sin()


class PopArt(Written):
    """Targets that running moments normalize."""

    def __init__(self):
        super().__init__(2)

    def forward(self, x):
        y = self.linear(x)
        loss = ((y - self.state[0]) / self.state[1].sqrt()).pow(3).mean()
        self.write(torch.stack([x.mean(), x.var()]))
        return loss


class State(Written):
    """A recurrent state that the next call reads."""

    def __init__(self):
        super().__init__(N, D)

    def forward(self, x):
        h = torch.tanh(self.linear(x) * self.state.sigmoid())
        self.write(h.detach())
        return h


class ClassWeights(Written):
    """A loss weighted by how often each class was seen."""

    def __init__(self):
        super().__init__(D)

    def forward(self, x):
        labels = x.detach().argmax(-1)
        loss = F.cross_entropy(self.linear(x), labels, reduction="none") / (1 + self.state)[labels]
        self.write(self.state + F.one_hot(labels, D).sum(0))
        return loss.mean()


class Slices(Written):
    """A buffer that is read by columns: what ``cat`` joins again is a copy."""

    def __init__(self):
        super().__init__(N, D)

    def forward(self, x):
        whole = torch.cat([self.state[:, :8], self.state[:, 8:]], 1)
        y = self.linear(x) * whole
        self.write(y.detach())
        return y


class Rows(Written):
    """A part of a buffer, which alone is written to."""

    def __init__(self):
        super().__init__(2 * N, D)

    def forward(self, x):
        y = self.linear(x) * self.state[:N].cos()
        with torch.no_grad():
            self.state[:N].mul_(2)
        return y


class Zeroed(Written):
    """An accumulator that is used and zeroed."""

    def __init__(self):
        super().__init__(D)

    def forward(self, x):
        y = self.linear(x) * (self.state * 3)
        self.state.zero_()
        return y


class Refilled(Written):
    """An input without gradient that is filled again for the next call."""

    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        y = torch.tanh(self.linear(x.exp()))
        x.zero_()
        return y


class Frozen(Written):
    """A frozen layer in front of a parameter; its input is scaled in place."""

    def __init__(self):
        super().__init__(1)
        self.frozen = nn.Linear(D, 2 * D).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(2 * D))
        self.out = nn.Linear(2 * D, D)

    def forward(self, x):
        y = self.out(torch.tanh(self.frozen(x)) * self.scale)
        x.mul_(2)
        return y


class Residual(Written):
    """A stream that a block adds to in place, from a copy of it."""

    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        y = self.linear(torch.cat([x[:3], x[3:]]).sigmoid() * 2)
        x.add_(y.detach())
        return y * y


class Gate(Written):
    """A bias of a router, moved by the load (arXiv 2408.15664); the gates read the old one."""

    def __init__(self):
        super().__init__(D)

    def forward(self, x):
        scores = self.linear(x).sigmoid() * self.state.tanh()
        top = (scores + self.state).topk(2, -1).indices
        load = F.one_hot(top, D).sum((0, 1)).to(x.dtype)
        y = scores.gather(-1, top) * 2
        self.write(self.state + 0.1 * (load.mean() - load).sign())
        return y


class Norm(Written):
    """A norm whose weight is a moving average."""

    def __init__(self):
        super().__init__(D)

    def forward(self, x):
        y = self.linear(F.rms_norm(self.linear(x), (D,)) * (1 + self.state))
        self.write(self.state * 0.5)
        return y


class Loop(Written):
    """A table of an earlier call, which this call replaces and also returns."""

    def __init__(self):
        super().__init__(N, D)

    def forward(self, x):
        old = self.state * 1
        y = self.linear(x) * old.exp()
        self.write(x.detach())
        return y + self.state


ALL = {kind.__name__: kind for kind in Written.__subclasses__()}


def step(name: str, compile_: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    """Output, all that was written to, and the gradients, of one step."""
    torch.manual_seed(0)
    model, x = ALL[name]().double(), torch.randn(N, D, dtype=torch.float64)
    y = compile_(model)(x)
    (y.sin().sum() if y.dim() else y).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), x, *model.buffers(), *gradients]
