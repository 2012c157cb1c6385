# SPDX-License-Identifier: Apache-2.0
"""A small layer, and how the GPU tests compile it and measure errors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """A Llama layer without its attention; ``bias`` puts a bias on every projection."""

    def __init__(self, d: int = 256, f: int = 640, bias: bool = False):
        super().__init__()
        self.o, self.q = nn.Linear(d, d, bias), nn.Linear(d, d, bias)
        self.gate, self.up = nn.Linear(d, f, bias), nn.Linear(d, f, bias)
        self.down = nn.Linear(f, d, bias)
        self.norm1, self.norm2 = Norm(d), Norm(d)

    def forward(self, x, y):
        x = x + self.o(y)
        h = self.norm1(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x, self.q(self.norm2(x))


def make(dtype=torch.bfloat16, **how) -> Layer:
    torch.manual_seed(0)
    return Layer(**how).cuda().to(dtype).eval()


def compiled(model, **options):
    return torch.compile(model, backend="coda", options={"gate": "always", **options})


def errors(outputs, exact) -> list[float]:
    return [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(outputs, exact, strict=True)
    ]


def either_order(model: Layer) -> Iterator[None]:
    """``model`` twice, gate's weight at the lower address and at the higher."""
    lower, higher = sorted((model.gate.weight, model.up.weight), key=torch.Tensor.data_ptr)
    for gate, up in ((lower, higher), (higher, lower)):
        model.gate.weight, model.up.weight = gate, up
        torch._dynamo.reset()
        yield
