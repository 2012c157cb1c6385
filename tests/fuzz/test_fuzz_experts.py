# SPDX-License-Identifier: Apache-2.0
"""Random mixtures of experts in float64, found however they are spelled, gradients as eager's.
``FUZZ`` is "SEED N", as in ``test_fuzz``."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.nn.functional as F
from checking import check_gradients, randn
from experts import COUNTS, GATHERS, SORTS, SUMS, Block, D, E, halves, interleaved, no_gate
from experts import two_weights as twice
from torch import nn
from torch.utils.checkpoint import checkpoint

FIRST, COUNT = map(int, os.environ.get("FUZZ", "0 12").split())


class Layer(nn.Module):
    """A norm, a router and experts, with what models have around them."""

    def __init__(self, r: random.Random):
        super().__init__()
        how = {"sort": SORTS, "count": COUNTS, "gather": [*GATHERS], "sum": SUMS}
        how |= {"up": (halves, halves, twice, no_gate, interleaved)}
        flags = {name: r.random() < 0.3 for name in ("masked", "biased")}
        self.block = Block(**{name: r.choice(ways) for name, ways in how.items()}, **flags)
        self.top_k, self.draws = r.randint(2, 4), [r.random() < 0.4 for _ in range(5)]
        shapes = {"gamma": (D,), "router": (E, D), "o": (D, D)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(randn(*shape) * D**-0.5))
        for parameter in self.parameters():
            parameter.requires_grad_(r.random() < 0.8)

    def layer(self, x):
        normalized, none, shared, again, auxiliary = self.draws
        x = x + F.linear(x, self.o)
        h = F.rms_norm(x, (D,), 1 + self.gamma, 1e-5)
        probabilities = F.linear(h, self.router).softmax(-1)
        w, ids = torch.topk(probabilities, self.top_k)
        w = w / w.sum(-1, keepdim=True) if normalized else w
        if none and self.block.masked:
            ids = torch.where(ids % 3 == 0, E, ids)
        y = x + self.block(h, ids, w)
        y = y + torch.sigmoid(h) * h if shared else y
        y = y + self.block(torch.tanh(h), ids, w) if again else y
        return y, probabilities.mean(0).square().sum() if auxiliary else y

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.draws[0] else self.layer(x)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_mixture(seed):
    r = random.Random(seed)  # noqa: S311
    layer, x = Layer(r), randn(r.choice([1, 2, 7, 33]), D).requires_grad_()
    harness = check_gradients(layer, x)
    assert harness.counts["experts"] == 1 + layer.draws[3]
    assert harness.counts["experts_backward"] == 1 + layer.draws[3]
