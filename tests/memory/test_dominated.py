# SPDX-License-Identifier: Apache-2.0
"""No plan of a graph loses to another plan of it: what takes more time has a lower peak."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from torch import nn

from coda_inductor.memory import partition
from coda_inductor.memory.planner import DOUBT

D, ROWS = 16, 32
#: Of forty, which all pass, a fair share of ``make test``.
SEEDS = range(8)


class Drawn(nn.Module):
    """Layers with norms before or behind products, one of several MLPs, and attention or none; a
    head with its loss, or none."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)  # noqa: S311
        self.layers, self.vocab = draw.randint(3, 4), draw.choice((0, 64, 512))
        self.before, self.behind = draw.choice(((1, 0), (0, 1), (1, 1), (0, 0)))
        self.mlp, self.heads = draw.choice(("gate", "packed", "gelu")), draw.choice((0, 2))
        wide, generator = draw.choice((2, 4)) * D, torch.Generator().manual_seed(seed)

        def weights(n: int, k: int) -> nn.ParameterList:
            shape = (n, k)
            made = (
                torch.randn(shape, dtype=torch.float64, generator=generator) / 8
                for _ in range(self.layers)
            )
            return nn.ParameterList(made)

        self.q, self.o, self.gate = weights(D, D), weights(D, D), weights(wide, D)
        self.up, self.both, self.down = weights(wide, D), weights(2 * wide, D), weights(D, wide)
        self.head = nn.Parameter(torch.ones(self.vocab or 1, D, dtype=torch.float64))

    def forward(self, x):
        for i in range(self.layers):
            q = F.linear(F.rms_norm(x, (D,)) if self.before else x, self.q[i])
            if self.heads:
                q = q.view(1, ROWS, self.heads, -1).transpose(1, 2)
                q = F.scaled_dot_product_attention(q, q, q, is_causal=True)
                q = q.transpose(1, 2).reshape(ROWS, D)
            x = self.added(x, F.linear(q, self.o[i]))
            h = F.rms_norm(x, (D,)) if self.before else x
            if self.mlp == "gate":
                h = F.silu(F.linear(h, self.gate[i])) * F.linear(h, self.up[i])
            elif self.mlp == "packed":
                gate, up = F.linear(h, self.both[i]).chunk(2, -1)
                h = F.silu(gate) * up
            else:
                h = F.gelu(F.linear(h, self.up[i]))
            x = self.added(x, F.linear(h, self.down[i]))
        labels = torch.arange(ROWS) % max(self.vocab, 1)
        return F.cross_entropy(F.linear(x, self.head), labels) if self.vocab else x

    def added(self, x, h):
        return x + (F.rms_norm(h, (D,)) if self.behind else h)


@pytest.fixture
def planned(monkeypatch):
    """The chains that were made, with all of their choices, and the timelines."""
    chains, timelines, cut = [], [], partition.Chain.cut

    class Timeline(partition.Timeline):
        def __init__(self, *given):
            super().__init__(*given)
            timelines.append(self)

    def seen(chain, *given):
        chains.append((chain, [chain[i] for i in range(len(chain))]))
        return cut(chain, *given)

    monkeypatch.setattr(partition, "Timeline", Timeline)
    monkeypatch.setattr(partition.Chain, "cut", seen)
    return chains, timelines


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_takes_more_time_has_a_lower_peak(seed, planned):
    x = torch.ones(ROWS, D, dtype=torch.float64, requires_grad=True)
    Harness(gate="always", memory=0.0).train(Drawn(seed), x)
    ((chain, every),), (timeline,) = planned
    plans = []
    for share in range(11):
        allowed = share / 10 * every[0].kept
        index = chain.first(lambda choice, allowed=allowed: choice.kept <= allowed)
        index = chain.fastest(timeline.peak, len(chain) - 1 if index is None else index)
        plans.append((chain[index].ms, timeline.peak(chain[index].drop)))
    for less, more in itertools.pairwise(plans):
        assert less == more or (less[0] > more[0] and less[1] < more[1])
    for choice in every:  # those that were left out too
        ms, peak = choice.ms, timeline.peak(choice.drop)
        assert not any(mine >= ms and its * (1 - DOUBT) > peak for mine, its in plans)
