# SPDX-License-Identifier: Apache-2.0
"""What the tests of rotated queries and keys share: sizes, inputs, layers one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from checking import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

B, T, H, D, WIDTH = 2, 6, 4, 8, 24


class Stack(nn.Module):
    """Layers, in float64, each in a checkpoint if ``checkpointed``."""

    def __init__(self, layers: Iterable[nn.Module], checkpointed: bool):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(layers).double(), checkpointed

    def forward(self, x, cos, sin):
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return x


def inputs(width=D, rows=(1, T)):
    """Tables that are no rotations: what holds is to hold whatever they are."""
    return randn(B, T, WIDTH).requires_grad_(), randn(*rows, width), randn(*rows, width)


def count(graph, target) -> int:
    return sum(node.target is target for node in graph.nodes)
