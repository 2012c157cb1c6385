# SPDX-License-Identifier: Apache-2.0
"""A model compiled in blocks: each by itself, or marked inside a compiled model. One block's graph
serves all of them, however many there are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import coda_inductor
from coda_inductor import report

D, HIDDEN, ROWS = 16, 24, 6
OPTIONS = {"gate": "always", "reference": True}


class Block(nn.Module):
    """Two norms, a gate, two residuals: (..., D) -> (..., D)."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.gate, self.up = (nn.Linear(D, HIDDEN, bias=False) for _ in range(2))
        self.down, self.out = nn.Linear(HIDDEN, D, bias=False), nn.Linear(D, D, bias=False)

    def body(self, x):
        h = self.norm1(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.out(self.norm2(x))

    def forward(self, x):
        return self.body(x)


class Region(Block):
    """Marked, so that torch compiles it once inside of a larger graph."""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.body(x)


class Stack(nn.Module):
    def __init__(self, kind: type[Block], count: int):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def fresh(without_code):
    """Graphs are compiled here, not found in a cache."""
    torch._dynamo.reset()
    report.forget()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def gradients(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.sin().sum().backward()
    found = [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return found


def whole(model):
    model.compile(backend="coda", options=OPTIONS)


def each(model):
    for block in model.blocks:
        block.compile(backend="coda", options=OPTIONS)


WAYS = {"each block": (Block, each), "marked blocks": (Region, whole)}


def trained(way: str, count: int) -> dict[str, int]:
    """Train as eager does; how often each pattern fired."""
    kind, compile_ = WAYS[way]
    torch.manual_seed(0)
    model, x = Stack(kind, count).double(), torch.randn(ROWS, D, dtype=torch.float64)
    want = gradients(copy.deepcopy(model), x)
    compile_(model)
    counters["coda"].clear()
    for have in (gradients(model, x), gradients(model, x)):  # the second call finds all compiled
        for left, right in zip(have, want, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    return dict(counters["coda"])


def test_blocks_by_themselves_are_one_graph():
    assert trained("each block", 3)["swiglu"] == 1
    (only,) = coda_inductor.reports()
    # gate and up, down, out; their gradients: out, down, up and gate
    assert sum(site.fused for site in only.sites) == 6
    (miss,) = only.near_misses
    assert "its input is not made by a GEMM" in miss
    # That norm's dot (over N) and gamma's gradient (over M) are taken where its gradient is made.
    (dgrad,) = (s for s in only.sites if "gate" in s.site and s.role == "input gradient")
    assert {reduce.axis for reduce in dgrad.program.reduces} == {"row", "col"}


def test_marked_blocks_are_compiled_once():
    """Torch hands a region's graph over for the forward and the backward pass; not for each
    block."""
    found = trained("marked blocks", 4)
    names = ("swiglu", "swiglu_backward", "rms_norm", "rms_norm_backward")
    assert all(1 <= found[name] <= 2 for name in names), found


def test_without_gradients():
    torch.manual_seed(0)
    x = torch.randn(ROWS, D, dtype=torch.float64)
    for kind, compile_ in WAYS.values():
        torch._dynamo.reset()
        model = Stack(kind, 2).double()
        with torch.no_grad():
            want = model(x)
            compile_(model)
            torch.testing.assert_close(model(x), want, rtol=1e-10, atol=1e-10)
    assert all(sum(site.fused for site in found.sites) == 3 for found in coda_inductor.reports())
