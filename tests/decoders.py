# SPDX-License-Identifier: Apache-2.0
"""A small decoder, which may be sharded, checkpointed, tied, or given dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HEADS, WIDTH = 64, 4, 32


class Block(nn.Module):
    """Norm, causal attention, residual; norm, SwiGLU, residual; dropout behind both branches.
    ``turns``: each head of queries and keys is rotated."""

    def __init__(self, width: int = WIDTH, *, turns: bool = False, dropout: float = 0.0):
        super().__init__()
        self.width, self.turns = width, turns
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        n = self.norm1(x)
        q, k, v = self.q(n), self.k(n), self.v(n)
        heads = (*q.shape[:2], -1, self.width // HEADS)  # those of this rank
        q, k, v = (t.view(heads).transpose(1, 2) for t in (q, k, v))
        if self.turns:
            q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).flatten(2)))
        n = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(n)) * self.up(n)))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Heads (B, H, T, d), each position's by angles of its own."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], dtype=x.dtype)
    angles = torch.outer(places, 0.5 ** torch.arange(half, dtype=x.dtype)).repeat(1, 2)
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * angles.cos()) + (other * angles.sin())


class Decoder(nn.Module):
    """Tokens to logits; ``each`` is called as ``each(block, x)``, to checkpoint a block, say."""

    def __init__(
        self,
        layers: int = 2,
        width: int = WIDTH,
        *,
        tied: bool = False,
        each: Callable[..., torch.Tensor] = lambda block, x: block(x),
        **how: bool | float,
    ):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, **how) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, VOCABULARY, bias=False)
        self.each = each
        for name, parameter in self.named_parameters():
            if "norm" in name:  # ones would hide a weight in the wrong place
                nn.init.normal_(parameter, 1.0, 0.3)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.trunk(tokens))

    def trunk(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            x = self.each(block, x)
        return self.norm(x)
