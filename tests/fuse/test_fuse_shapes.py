# SPDX-License-Identifier: Apache-2.0
"""Shapes and layouts: symbolic, empty, ragged, strided, expanded, shared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, assert_same, check, check_gradients, leave_custom_ops, randn, reasons
from harness import Harness
from torch import nn

K, N = 8, 10


def block(x, w, gamma, gate, up):
    """Residual, norm, SwiGLU: tile, row and column operands, partials, a pair."""
    stream = x + F.linear(x, w)
    n = F.rms_norm(stream, (K,), gamma, 1e-3)
    return F.silu(F.linear(n, gate)) * F.linear(n, up), stream


def weights():
    return randn(K, K), randn(K), randn(N, K), randn(N, K)


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["B", "T", "B and T"])
def test_symbolic_leading_dimensions(dims, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch)
    harness, args = Harness(), weights()
    compiled = torch.compile(block, backend=harness)
    for sizes in ((2, 3), (5, 4), (7, 9), (1, 2)):
        lead = [sizes[d] if d in dims else 6 for d in (0, 1)]
        x = randn(*lead, K)
        for d in dims:
            torch._dynamo.maybe_mark_dynamic(x, d)
        with torch.no_grad():
            assert_same(compiled(x, *args), block(x, *args))
    assert {site.how for site in harness.report.sites} == {"kernel" if custom else "reference"}


def test_one_dynamic_graph_serves_every_batch_and_length():
    harness, model = Harness(), Weights(block, *weights())
    compiled = torch.compile(model, backend=harness, dynamic=True)
    with torch.no_grad():
        for lead in ((2, 3), (5, 4), (7, 90)):
            x = randn(*lead, K)
            assert_same(compiled(x), model(x))
    assert len(harness.report.sites) == 2  # one graph: the residual's GEMM and the pair
    assert all(site.fused for site in harness.report.sites)


@pytest.mark.parametrize("shape", [(0, 3, K), (2, 0, K), (0, K)], ids=str)
@pytest.mark.parametrize("custom", [False, True])
def test_empty_batch(shape, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch)
    check(block, randn(*shape), *weights())


@pytest.mark.parametrize("dynamic", [True, False])
def test_empty_batch_after_a_full_one(dynamic):
    model = Weights(block, *weights())
    compiled = torch.compile(model, backend=Harness(), dynamic=dynamic)
    with torch.no_grad():
        for batch in (3, 2, 0, 1):
            x = randn(batch, 4, K)
            assert_same(compiled(x), model(x))


def test_symbolic_weights_are_a_named_fallback():
    args = randn(2, 3, K), *weights()
    harness = check(block, *args, dynamic=True, strict=False)
    assert "N or K is symbolic" in reasons(harness)
    # rms_norm's normalized_shape fixes K; only gate and up keep a symbolic N.
    assert [site.how for site in harness.report.sites] == ["reference", "unfused", "unfused"]


@pytest.mark.parametrize("rows", [1, 7, 127, 129])
def test_ragged_rows_with_several_tiles(rows, monkeypatch):
    leave_custom_ops(monkeypatch, "64x32:1x1:co")
    harness = check(block, randn(rows, K), *weights())
    assert {"rms_norm", "swiglu"} <= set(harness.counts)
    assert len(harness.fused) == 2


LAYOUTS = {
    "every other row": lambda: randn(8, 3, K)[::2],
    "transposed batch": lambda: randn(3, 4, K).transpose(0, 1),
    "column slice": lambda: randn(4, 3, 2 * K)[..., :K],
    "strided columns": lambda: randn(4, 3, 2 * K)[..., ::2],
    "expanded batch": lambda: randn(1, 3, K).expand(4, 3, K),
    "expanded rows": lambda: randn(4, 1, K).expand(4, 3, K),
    "features first": lambda: randn(K, 4, 3).permute(1, 2, 0),
    "offset": lambda: randn(5, 3, K)[1:],
}


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_and_expanded_inputs(name, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch)
    check(block, LAYOUTS[name](), *weights())


@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_and_expanded_residuals(name):
    check(lambda x, y, w: y + F.linear(x, w), randn(4, 3, K), LAYOUTS[name](), randn(K, K))


def test_strided_weights_and_vectors():
    w, gamma = randn(K, 2 * K)[:, ::2], randn(2 * K)[::2]
    gate, up = randn(2 * N, K)[::2], randn(K, N).t()
    check(block, randn(2, 3, K), w, gamma, gate, up)


def test_expanded_bias():
    bias = randn(1).expand(N)
    check(lambda x, w: F.linear(x, w, bias).relu(), randn(4, K), randn(N, K))


def test_weights_shared_between_layers():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(K), nn.Linear(K, K, bias=False)

        def forward(self, x):
            for _ in range(3):
                x = x + self.linear(self.norm(x))
            return x

    harness = check(Shared().double(), randn(2, 3, K))
    assert harness.counts == {"residual": 3, "rms_norm": 2}


def test_one_weight_as_gate_and_up():
    def function(x, w):
        return F.silu(F.linear(x, w)) * F.linear(x, w)

    check(function, randn(4, K), randn(N, K))


def test_input_that_is_also_the_weight():
    check(lambda x: torch.relu(x @ x) + x, randn(K, K))


def test_one_column_and_one_row():
    check(lambda x, w: torch.relu(x @ w + 1) * x[:, :1], randn(6, K), randn(K, 1))
    check(lambda x, w: torch.relu(x @ w + 1).sum(-1), randn(1, K), randn(K, N))


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.amax], ids=lambda f: f.__name__)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [[], [0]], ids=str)
def test_reductions_of_one_row_without_its_dimension(dim, keepdim, reduce):
    """No dimension means all of them."""

    def function(x, w):
        return reduce((x @ w).squeeze(0) * 2, dim=dim, keepdim=keepdim)

    inputs = randn(1, K), randn(K, N)
    check(function, *inputs)
    check_gradients(function, *(t.requires_grad_() for t in inputs))


def test_square_product_takes_no_row_for_a_column():
    def function(x, w, v):
        return F.linear(x, w) * v[:, None] + v

    check(function, randn(K, K), randn(K, K), randn(K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_float_dtype(dtype):
    check(block, randn(2, 3, K, dtype=dtype), *(w.to(dtype) for w in weights()))
