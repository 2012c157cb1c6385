# SPDX-License-Identifier: Apache-2.0
"""A model with an LM head whose loss is written in any way, and what it is called with."""

from __future__ import annotations

import torch
from checking import randn
from torch import nn

V, D, B, T = 300, 16, 2, 6


class LanguageModel(nn.Module):
    def __init__(self, loss, dtype=torch.float64, bias=False):
        super().__init__()
        self.body, self.head = nn.Linear(D, D, dtype=dtype), nn.Linear(D, V, bias, dtype=dtype)
        self.loss = loss

    def forward(self, x, labels):
        return self.loss(self.head(torch.tanh(self.body(x))), labels)


class Several(nn.ModuleList):
    """Models of the same inputs, in one graph."""

    def forward(self, *inputs):
        return [model(*inputs) for model in self]


def inputs(dtype=torch.float64):
    """(B, T, D), and labels (B, T) of which two of the first sequence are 3."""
    labels = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
    labels[0, 1:3] = 3
    return randn(B, T, D).to(dtype).requires_grad_(), labels
