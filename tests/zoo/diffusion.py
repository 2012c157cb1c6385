# SPDX-License-Identifier: Apache-2.0
"""Blocks of diffusion transformers, as diffusers writes them."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16


def modulated(norm, x, scale, shift):
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


class Modulated(nn.Module):
    """What all blocks have: vectors of the time step, and attention of single-headed rows."""

    def __init__(self, vectors: int, width: int = WIDTH):
        super().__init__()
        self.vectors = vectors
        self.embed = nn.Linear(width, vectors * width)
        self.qkv = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.up, self.gelu = nn.Linear(width, 4 * width), nn.GELU(approximate="tanh")

    def chunks(self, step):
        return self.embed(F.silu(step)).chunk(self.vectors, dim=1)

    def attend(self, n):
        q, k, v = (each(n)[:, None] for each in self.qkv)
        return F.scaled_dot_product_attention(q, k, v)[:, 0]


class Single(Modulated):
    """FLUX's: text and image in one stream, attention and MLP side by side."""

    def __init__(self, width: int = WIDTH):
        super().__init__(3, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.out = nn.Linear(5 * width, width)

    def forward(self, x, text, step):
        x = torch.cat([text, x], dim=1)
        shift, scale, gate = self.chunks(step)
        n = modulated(self.norm, x, scale, shift)
        mlp = self.gelu(self.up(n))
        x = x + gate[:, None] * self.out(torch.cat([self.attend(n), mlp], dim=2))
        return x[:, text.shape[1] :], x[:, : text.shape[1]]


class Blocks(nn.Module):
    """Several of one kind, on all streams."""

    def __init__(self, kind, layers: int, **how):
        super().__init__()
        self.blocks = nn.ModuleList([kind(**how) for _ in range(layers)])

    def forward(self, *streams):
        *streams, step = streams
        for block in self.blocks:
            found = block(*streams, step)
            streams = found if isinstance(found, tuple) else (found,)
        return streams
