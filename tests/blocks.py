# SPDX-License-Identifier: Apache-2.0
"""Small modules that many tests compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def stack(layers: int, bias: bool = False) -> nn.Sequential:
    """An input projection, so that the first norm too is behind a GEMM, then layers, in float64."""
    first = nn.Linear(WIDTH, WIDTH, bias)
    return nn.Sequential(first, *(Layer(bias) for _ in range(layers))).double()


V, T, HEADS = 96, 6, 2


class Whole(nn.Module):
    """A layer of a Llama in which every pass finds something to do: a table that the head shares,
    packed projections, shared heads, a constant mask, norms, a checkpointed region, loss and
    logits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 2 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, False)
        self.down = nn.Linear(HIDDEN, WIDTH, False)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(WIDTH) for _ in range(3))

    def attend(self, x):
        q, k, v = self.qkv(self.norm1(x)).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q = torch.ops.aten.relu.default(q).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (t[:, None].repeat_interleave(HEADS, 1) for t in (k, v))
        mask = torch.arange(T)[:, None] >= torch.arange(T)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.o(y.transpose(1, 2).reshape(x.shape))

    def feed(self, x):
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(torch.ops.aten.silu.default(gate) * up)

    def forward(self, tokens, labels):
        x = self.attend(self.table(tokens))
        x = checkpoint(self.feed, x, use_reentrant=False) if self.training else self.feed(x)
        logits = F.linear(self.norm3(x), self.table.weight)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits
