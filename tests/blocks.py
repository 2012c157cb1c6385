# SPDX-License-Identifier: Apache-2.0
"""Small modules that many tests compile."""

from __future__ import annotations

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
