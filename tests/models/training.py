# SPDX-License-Identifier: Apache-2.0
"""A small decoder and the two ways to run a training step, shared by the tests of contexts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, D, HIDDEN, HEADS = 64, 32, 48, 4


class Block(nn.Module):
    """Norm, causal attention, residual; norm, SwiGLU, residual; dropout behind both branches."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(D, HIDDEN, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(HIDDEN, D, bias=False), nn.Dropout(dropout)

    def forward(self, x):
        B, T, _ = x.shape
        n = self.norm1(x)
        q, k, v = (f(n).view(B, T, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).reshape(B, T, D)))
        n = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(n)) * self.up(n)))


class Decoder(nn.Module):
    """Tokens to logits; ``each`` is called as ``each(block, x)``, to checkpoint a block, say."""

    def __init__(
        self,
        layers: int = 2,
        *,
        tied: bool = False,
        dropout: float = 0.0,
        each: Callable[..., torch.Tensor] = lambda block, x: block(x),
    ):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(D, eps=1e-5), nn.Linear(D, VOCABULARY, bias=False)
        self.each = each
        for name, parameter in self.named_parameters():
            if "norm" in name:  # ones would hide a gamma in the wrong place
                nn.init.normal_(parameter, 1.0, 0.3)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.each(block, x)
        return self.head(self.norm(x))


def counts(layers: int) -> dict[str, int]:
    """What fires: every norm but the first, whose input is an embedding, and every gate."""
    norms = {"rms_norm": 2 * layers, "rms_norm_backward": 2 * layers}
    return {**norms, "swiglu": layers, "swiglu_backward": layers}


def fired(harness: Any) -> dict[str, int]:
    """The counters of ``counts``, as they were."""
    return {name: harness.counts[name] for name in counts(1)}


def tokens(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: Any, eagers: Any, tolerance: float) -> None:
    """Relative to each tensor's norm; both are dicts of tensors."""
    assert ours.keys() == eagers.keys()
    for name, want in eagers.items():
        error = (ours[name].double() - want.double()).norm() / want.double().norm()
        assert error <= tolerance, f"{name}: {error}"


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)
