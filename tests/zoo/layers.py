# SPDX-License-Identifier: Apache-2.0
"""A gated MLP and what stands around it, a decoder, heads with their losses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN = 16, 24


def swiglu(gate, up):
    return F.silu(gate) * up


def rms(width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5)


class Spelled(nn.Module):
    """RMSNorm as Llama writes it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    """A gated MLP behind a norm, with a residual. ``front``: behind x + o(y) as well, where y is x
    unless it is given. A part that is False is left out."""

    def __init__(
        self,
        width: int = WIDTH,
        hidden: int = HIDDEN,
        *,
        gate: Callable[..., torch.Tensor] = swiglu,
        norm: Callable[[int], nn.Module] = rms,
        front: bool = False,
        down: bool = True,
        residual: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.function, self.residual = gate, residual
        self.o = nn.Linear(width, width, bias) if front else None
        self.gate, self.up = (nn.Linear(width, hidden, bias) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias) if down else nn.Identity()
        self.norm, self.dropout = norm(width), nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x, y=None):
        x = x if self.o is None else x + self.o(x if y is None else y)
        h = self.norm(x)
        h = self.dropout(self.down(self.function(self.gate(h), self.up(h))))
        return x + h if self.residual else h


D = 8


def whole() -> Gated:
    """Every built-in pattern once, on x (..., D): a residual, a norm, a gate."""
    return Gated(D, 16, norm=nn.RMSNorm, front=True, down=False, residual=False)


class Layer(Gated):
    """A Llama layer without its attention, and a projection of the next one's."""

    def __init__(self, width: int = 256, hidden: int = 640, bias: bool = False):
        super().__init__(width, hidden, norm=Spelled, front=True, bias=bias)
        self.norm2, self.q = Spelled(width), nn.Linear(width, width, bias)

    def forward(self, x, y=None):
        x = super().forward(x, y)
        return x, self.q(self.norm2(x))


class Mlp(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, width: int = 64, hidden: int = 128, approximate: str = "none", bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        self.approximate = approximate

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x), approximate=self.approximate))


class Lora(nn.Module):
    """A frozen layer with an adapter beside it, as peft writes it."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 0.5):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * self.scale


class Attention(nn.Module):
    """x + o(causal attention of the norm of x). ``turn``, called with heads (B, H, T, d) and with
    ``tables``, rotates queries and keys; ``groups``: heads of keys and values."""

    def __init__(
        self,
        width: int,
        heads: int = 4,
        groups: int | None = None,
        *,
        head: int | None = None,
        turn: Callable[..., torch.Tensor] | None = None,
        norm: Callable[[int], nn.Module] = rms,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.head, self.turn, groups = head or width // heads, turn, groups or heads
        self.norm1, wide = norm(width), (heads * self.head, groups * self.head)
        self.q, self.k, self.v = (nn.Linear(width, wide[n > 0], bias) for n in range(3))
        self.o = nn.Linear(wide[0], width, bias)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.grouped = {"enable_gqa": True} if groups < heads else {}

    def forward(self, x, *tables):
        n = self.norm1(x)
        q, k, v = self.q(n), self.k(n), self.v(n)
        q, k, v = (t.view(*t.shape[:2], -1, self.head).transpose(1, 2) for t in (q, k, v))
        if self.turn is not None:
            q, k = self.turn(q, *tables), self.turn(k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **self.grouped)
        return x + self.dropout(self.o(y.transpose(1, 2).flatten(2)))


class Block(Attention):
    """Attention, then SwiGLU behind a second norm, with a residual each."""

    def __init__(self, width: int, **how: Any):
        super().__init__(width, **how)
        self.norm2 = rms(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, *tables):
        x = super().forward(x, *tables)
        n = self.norm2(x)
        return x + self.dropout(self.down(swiglu(self.gate(n), self.up(n))))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Heads (B, H, T, d), each position's by angles of its own."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], dtype=x.dtype)
    angles = torch.outer(places, 0.5 ** torch.arange(half, dtype=x.dtype)).repeat(1, 2)
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * angles.cos()) + (other * angles.sin())


VOCABULARY = 64


class Decoder(nn.Module):
    """Tokens to logits; ``each`` is called as ``each(block, x)``, to checkpoint a block, say."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 32,
        *,
        tied: bool = False,
        each: Callable[..., torch.Tensor] = lambda block, x: block(x),
        **how: Any,
    ):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, **how) for _ in range(layers))
        self.norm, self.head = rms(width), nn.Linear(width, VOCABULARY, bias=False)
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


V, T, HEADS = 96, 6, 2


class Everything(nn.Module):
    """A layer of a Llama in which every pass finds something to do: a table that the head shares,
    packed projections, shared heads, a constant mask, norms, a checkpoint, loss and logits."""

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
