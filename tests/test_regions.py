# SPDX-License-Identifier: Apache-2.0
"""A model compiled in blocks: each by itself, or marked inside a compiled model. One block's graph
serves all of them, however many there are."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import WIDTH, Layer, Region
from torch import nn
from torch._dynamo.utils import counters

import coda_inductor
from coda_inductor import report

OPTIONS = {"gate": "always", "reference": True}


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
    for block in model:
        block.compile(backend="coda", options=OPTIONS)


WAYS = {"each block": (Layer, each), "marked blocks": (Region, whole)}


def trained(way: str, count: int) -> dict[str, int]:
    """Train as eager does; how often each pattern fired."""
    kind, compile_ = WAYS[way]
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(count))).double()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
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
    # o, gate and up, down; the gradients of v, of up and gate, and of down
    assert sum(site.fused for site in only.sites) == 6
    (miss,) = only.near_misses
    assert "its input is not made by a GEMM" in miss
    # That norm's dot (over N) and gamma's gradient (over M) are taken where its gradient is made.
    (dgrad,) = (s for s in only.sites if s.site.endswith("v") and s.role == "input gradient")
    assert {reduce.axis for reduce in dgrad.program.reduces} == {"row", "col"}


def test_marked_blocks_are_compiled_once():
    """Torch hands a region's graph over for the forward and the backward pass; not for each
    block."""
    found = trained("marked blocks", 4)
    names = ("swiglu", "swiglu_backward", "rms_norm", "rms_norm_backward")
    assert all(1 <= found[name] <= 2 for name in names), found
