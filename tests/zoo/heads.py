# SPDX-License-Identifier: Apache-2.0
"""A head with its loss, and a table that may be its head, with what they are called with."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

V, D, B, T = 300, 16, 2, 6
ROWS = B * T


def wide(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Head(nn.Module):
    """A language model's head behind a linear layer. ``loss`` is called with logits and labels, or
    ``end`` with the head, what it reads and labels; ``between`` with x and what the layer makes."""

    def __init__(
        self,
        loss: Callable[..., Any] | None = None,
        dtype: torch.dtype = torch.float64,
        bias: bool = False,
        *,
        width: int = D,
        vocabulary: int = V,
        end: Callable[..., Any] | None = None,
        between: Callable[..., torch.Tensor] = lambda x, y: torch.tanh(y),
        body_bias: bool = True,
    ):
        super().__init__()
        self.body = nn.Linear(width, width, body_bias, dtype=dtype)
        self.head = nn.Linear(width, vocabulary, bias, dtype=dtype)
        self.loss, self.end, self.between = loss, end, between

    def forward(self, x, labels):
        h = self.between(x, self.body(x))
        return self.end(self.head, h, labels) if self.end else self.loss(self.head(h), labels)


class Tied(nn.Module):
    """Looks up ``lookups`` times in a table that is its head too, if ``tied``."""

    def __init__(
        self, dtype=torch.float64, padding=None, lookups=1, rows=64, width=8, *, tied: bool = True
    ):
        super().__init__()
        table, inner = (torch.randn(n, width, dtype=torch.float64) for n in (rows, width))
        self.weight, self.inner = nn.Parameter(table.to(dtype)), nn.Parameter(inner.to(dtype))
        self.padding, self.lookups, self.tied = padding, lookups, tied

    def forward(self, tokens):
        each = (tokens.roll(i, 1) for i in range(self.lookups))
        x = sum(F.embedding(t, self.weight, padding_idx=self.padding) @ self.inner for t in each)
        return F.linear(x, self.weight) if self.tied else x


class Several(nn.ModuleList):
    """Models of the same inputs, in one graph."""

    def forward(self, *inputs):
        return [model(*inputs) for model in self]


def inputs(dtype=torch.float64):
    """(B, T, D), and labels (B, T) of which two of the first sequence are 3."""
    labels = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
    labels[0, 1:3] = 3
    return torch.randn(B, T, D, dtype=torch.float64).to(dtype).requires_grad_(), labels
