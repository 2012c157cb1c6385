# SPDX-License-Identifier: Apache-2.0
"""LayerNorm, biased and packed gates on a GPU: kernels, with errors beside torch.compile's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from layers import compiled, errors
from torch import nn

import coda_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

SLACK = 1.2


class Block(nn.Module):
    """A pre-norm block without its attention, and a head behind a last norm."""

    def __init__(self, d: int = 256, f: int = 640, packed: bool = False):
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(d) for _ in range(3))
        self.o, self.head, self.packed = nn.Linear(d, d), nn.Linear(d, d), packed
        self.up, self.down = nn.Linear(d, 2 * f if packed else f), nn.Linear(f, d)
        self.gate = None if packed else nn.Linear(d, f)
        for norm in (self.n1, self.n2, self.n3):
            nn.init.normal_(norm.weight, 1.0, 0.1)
            nn.init.normal_(norm.bias, 0.0, 0.1)

    def forward(self, x, y):
        x = x + self.o(self.n1(x) * y)
        n = self.n2(x)
        gate, up = self.up(n).chunk(2, -1) if self.packed else (self.gate(n), self.up(n))
        x = x + self.down(F.silu(gate) * up)
        return x, self.head(self.n3(x))


def run(call, model, xs, training):
    xs = [x.detach().requires_grad_(training) for x in xs]
    model.zero_grad()
    if not training:
        with torch.no_grad():
            return list(call(*xs))
    outputs = call(*xs)
    generator = torch.Generator("cuda").manual_seed(1)
    tangents = [
        torch.randn(o.shape, generator=generator, device="cuda").bfloat16().to(o.dtype)
        for o in outputs
    ]
    torch.autograd.backward(outputs, tangents)
    return [*outputs, *(x.grad for x in xs), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("packed", [False, True], ids=["two weights", "packed"])
@pytest.mark.parametrize("mean", [0, 10])
@pytest.mark.parametrize("rows", [7, 1000, 8192])
def test_error_is_no_worse_than_torch_compiles(rows, mean, packed, training):
    torch.manual_seed(0)
    model = Block(packed=packed).cuda().bfloat16()
    xs = [torch.randn(1, rows, 256, device="cuda") + mean, torch.randn(1, rows, 256, device="cuda")]
    xs = [x.bfloat16() for x in xs]
    wide = copy.deepcopy(model).float()
    exact = run(wide, wide, [x.float() for x in xs], training)
    stock, eager = copy.deepcopy(model), copy.deepcopy(model)
    theirs = errors(run(torch.compile(stock), stock, xs, training), exact)
    eagers = errors(run(eager, eager, xs, training), exact)
    mine = errors(run(compiled(model, strict=True), model, xs, training), exact)
    sites = [s for s in coda_inductor.reports()[-1].sites if s.fused]
    assert {s.how for s in sites} == {"kernel"}
    assert sum(s.program.paired for s in sites) == 1
    assert any("layer_norm" in s.patterns for s in sites) == (not training)
    for mine_, theirs_, eager_ in zip(mine, theirs, eagers, strict=True):
        assert 0 <= mine_ <= SLACK * max(theirs_, eager_), (mine, theirs, eagers)
