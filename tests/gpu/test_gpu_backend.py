# SPDX-License-Identifier: Apache-2.0
"""The real backend on a GPU: kernels in the graph, errors beside torch.compile's own, fallbacks."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from layers import assert_as_good, compiled, errors, make
from torch import nn

import coda_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh", "inference")]


@pytest.fixture
def inference():
    with torch.no_grad():
        yield


def inputs(rows: int, dtype=torch.bfloat16, d: int = 256):
    return [torch.randn(1, rows, d, device="cuda").to(dtype) for _ in range(2)]


@pytest.mark.parametrize("rows", [1, 7, 127, 1024, 8191])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_worse_than_torch_compiles(rows, dtype):
    model = make(dtype)
    assert_as_good(model, compiled(model, strict=True, fp16_norms=True), inputs(rows, dtype))
    assert {s.how for s in coda_inductor.reports()[-1].sites} == {"kernel"}


class LayerNorms(nn.Module):
    """A pre-norm block without its attention, and a head behind a last norm."""

    def __init__(self, packed: bool, d: int = 256, f: int = 640):
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


@pytest.mark.parametrize("packed", [False, True], ids=["two weights", "packed"])
@pytest.mark.parametrize("mean", [0, 10])
@pytest.mark.parametrize("rows", [7, 1000, 8192])
def test_layer_norms_and_gates(rows, mean, packed):
    torch.manual_seed(0)
    model = LayerNorms(packed).cuda().bfloat16()
    x, y = inputs(rows)
    assert_as_good(model, compiled(model, strict=True), [x + mean, y])
    sites = [s for s in coda_inductor.reports()[-1].sites if s.fused]
    assert {s.how for s in sites} == {"kernel"}
    assert sum(s.program.paired for s in sites) == 1
    assert any("layer_norm" in s.patterns for s in sites)


def test_wide_models_fall_back_with_one_warning(caplog):
    dtype = torch.float32
    model, xs = make(dtype), inputs(64, dtype)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "coda_inductor"):
        mine = compiled(model)(*xs)
    assert max(errors(mine, model(*xs))) < 1e-3  # torch's own TF32-free GEMMs
    assert [r.getMessage() for r in caplog.records if "float" in r.getMessage()]
    assert not any(site.fused for site in coda_inductor.reports()[-1].sites)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"FallbackError(.|\n)*no kernel"):
        compiled(model, strict=True)(*xs)
