# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in front of FP8 products waits until its result is quantized, or says why not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import leave_custom_ops
from harness import Harness, Stock
from passes import codes
from torch import nn
from zoo.float8 import HIDDEN, RECIPES, D, Stack, assert_exact, batch, convert, trained

from coda_inductor.graph.walk import base
from coda_inductor.semantic.fp8_casts import AMAX, CAST

ALL = {"gate": "always", "reference": True}


class Behind(nn.Module):
    """A product, a norm, and linear layers that read it; ``extra`` may read it as well."""

    def __init__(self, extra=None, norm=None):
        super().__init__()
        self.first, self.second = nn.Linear(D, D, bias=False), nn.Linear(D, HIDDEN, bias=False)
        self.norm, self.other = norm or nn.RMSNorm(D, eps=1e-5), extra
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x):
        n = self.norm(x + self.first(x))
        y = self.second(n)
        return y if self.other is None else (y, self.other(n))


def behind(recipe="rowwise", **kwargs):
    torch.manual_seed(0)
    return convert(Behind(**kwargs).bfloat16(), recipe)


def run(model, **options):
    harness = Harness(**ALL, **options)
    result = harness.train(model, batch().requires_grad_())
    return harness, result


@pytest.mark.parametrize(
    ("recipe", "gamma"), [*((recipe, True) for recipe in RECIPES), ("rowwise", False)]
)
def test_the_factor_is_that_of_the_cast(recipe, gamma):
    norm = nn.RMSNorm(D, eps=1e-5, elementwise_affine=gamma)
    harness, _ = run(behind(recipe, norm=norm))
    assert harness.counts["rms_norm"] == 1
    assert not [r for r in harness.report.refusals if r.what == "rms_norm"]
    casts = harness.graph.find_nodes(op="call_function", target=CAST)
    factors = {n.args[1] for n in casts if n.args[1] is not None}
    assert len(factors) == 1
    weights = {base(n.args[7]) for n in casts if n.args[7] is not None}
    assert len(weights) == gamma
    # The norm's input is in memory, once, and nothing else: h never leaves the tile.
    (first,) = [s for s in harness.fused if s.site == "first" and s.role == "forward"]
    assert [store.dtype for store in first.program.stores] == ["bfloat16"]
    assert "amax" in first.absorbed
    # In the forward pass and, where the weight's gradient is FP8, in the backward.
    assert sum(n.args[1] is not None for n in casts) == 1 + (recipe != "rowwise_with_gw_hp")
    read = [n for n in harness.graph.find_nodes(op="call_function", target=AMAX) if n.args[1]]
    assert len(read) == (recipe == "rowwise")  # columns need the factor first
    stock = Stock()
    stock.train(behind(recipe, norm=norm), batch().requires_grad_())
    assert_exact(harness, stock)


def test_nothing_normalized_leaves_the_forward_pass(monkeypatch):
    """With kernels the backward pass gets what it gets without the rewrite, and vectors: the
    results of products, the residual stream."""
    leave_custom_ops(monkeypatch)
    recipe = "rowwise"
    model = convert(Stack(layers=2).bfloat16(), recipe)
    harness = Harness(**ALL)
    trained(harness, model, batch())
    plain = Harness(**ALL, disable=["rms_norm"])
    trained(plain, convert(Stack(layers=2).bfloat16(), recipe), batch())
    assert harness.counts["rms_norm"] == 1
    assert plain.counts["rms_norm"] == 0
    vector = 4 * 2 * 16
    assert harness.saved_bytes() <= plain.saved_bytes() + 2 * vector
    matrices = [n.meta["val"] for n in harness.saved if n.op != "placeholder"]
    matrices = [v for v in matrices if v.dim() > 1 and min(v.shape[-2:]) > 1]
    assert sorted(v.numel() for v in matrices) == [32 * D, *[32 * HIDDEN] * 4]


def test_float32_under_autocast():
    """The norm's result is float32 there, and each layer casts it for itself."""
    model, x = Stack(layers=2), batch(torch.float32)
    harness, plain = Harness(**ALL), Harness(**ALL, disable=["rms_norm"])
    want = trained(Stock(), copy.deepcopy(model).double(), x.double())
    model = convert(model, "rowwise")
    with torch.autocast("cpu", torch.bfloat16):
        other = trained(plain, copy.deepcopy(model), x)
        have = trained(harness, model, x)
    assert harness.counts["rms_norm"] == 1  # nothing makes the first one's input
    assert "norm-read-elsewhere" not in codes(harness)
    for ours, theirs, exactly in zip(have, other, want, strict=True):
        error, reference = ((y.double() - exactly).norm() for y in (ours, theirs))
        assert error <= 1.2 * reference


class Scanned(Behind):
    def forward(self, x):
        return self.second(self.norm(self.first(x).cumsum(1)))


class Mixed(Behind):
    """A layer that torchao was told to leave reads the norm in the forward pass as well."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(16, D))

    def forward(self, x):
        n = self.norm(x + self.first(x))
        return self.second(n), F.linear(n, self.router)


STAY = [
    (lambda: Behind(extra=lambda n: n.float().cumsum(1)), "rowwise", "norm-read-elsewhere"),
    (Scanned, "rowwise", "norm-input-no-gemm"),
    (lambda: Behind(norm=nn.LayerNorm(D)), "rowwise", "norm-read-elsewhere"),
    (Mixed, "tensorwise", "norm-read-elsewhere"),
]


@pytest.mark.parametrize(("make", "recipe", "why"), STAY)
def test_what_stays_says_why(make, recipe, why):
    harness, _ = run(convert(make().bfloat16(), recipe))
    assert codes(harness) >= {why}
    assert harness.counts["rms_norm"] == 0
