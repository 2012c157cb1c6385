# SPDX-License-Identifier: Apache-2.0
"""Small modules that many tests compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

D = 8


class Block(nn.Module):
    """Every built-in pattern once."""

    def __init__(self):
        super().__init__()
        self.o, self.norm = nn.Linear(D, D, bias=False), nn.RMSNorm(D)
        self.gate, self.up = nn.Linear(D, 16, bias=False), nn.Linear(D, 16, bias=False)

    def forward(self, x):
        h = self.norm(x + self.o(x))
        return F.silu(self.gate(h)) * self.up(h)


WIDTH, HIDDEN = 16, 24


class Layer(nn.Module):
    """x + o(v(n(x))), then SwiGLU behind a second norm: a Llama layer, whose attention is a scan,
    of which nothing can run on a tile. x is (B, T, 16)."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-2), nn.RMSNorm(WIDTH, eps=1e-2)
        self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.weight)

    def body(self, x):
        x = x + self.o(self.v(self.norm1(x)).cumsum(1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x):
        return self.body(x)


class Region(Layer):
    """Marked, so that torch compiles it once inside of a larger graph."""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.body(x)


def stack(layers: int, bias: bool = False) -> nn.Sequential:
    """An input projection, so that the first norm too is behind a GEMM, then layers, in float64."""
    first = nn.Linear(WIDTH, WIDTH, bias)
    return nn.Sequential(first, *(Layer(bias) for _ in range(layers))).double()
