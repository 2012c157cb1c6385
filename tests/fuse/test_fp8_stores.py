# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 whose scale is known leave the tile as stores that saturate."""

from __future__ import annotations

import math

import pytest
import torch
from harness import Harness

from coda_inductor.program.dtypes import FP8

W = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
DTYPES = [getattr(torch, name) for name in FP8]


def quantized(x, dtype, bounds=None, scale=40.0):
    largest = torch.finfo(dtype).max
    low, high = bounds or (-largest, largest)
    y = torch.relu(x @ W).float() * scale
    return y.clamp(low, high).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_behind_its_clamp_is_a_store_and_one_that_may_overflow_is_torchs(dtype):
    """It makes NaN of what is too large, or infinity; a store does not."""
    x = torch.randn(24, 64).bfloat16()
    loose = (dtype, (-1e9, 1e9), 4000.0)
    harness, eager = Harness(), quantized(x, *loose)
    assert torch.equal(harness.run(quantized, x, *loose).isnan(), eager.isnan())
    dtypes = [store.dtype for site in harness.fused for store in site.program.stores]
    assert not {*FP8} & {*dtypes}
    assert "fp8-overflow" in {why.code for site in harness.fused for why in site.stops}
    x[3, 5], x[7, 0], x[9] = math.nan, math.inf, 0.0
    harness, eager = Harness(), quantized(x, dtype)
    ours = harness.run(quantized, x, dtype)
    (site,) = harness.fused
    assert [f"torch.{store.dtype}" for store in site.program.stores] == [str(dtype)]
    assert ours[3].isnan().all()
    assert (ours[7].float() == torch.finfo(dtype).max).any()
    # The product is rounded to bfloat16 in both: on a CPU a fused site does as unfused ops do.
    torch.testing.assert_close(ours.float(), eager.float(), rtol=0.25, atol=1e-3, equal_nan=True)


def test_who_reads_it_widened_sees_it_rounded():
    def function(x):
        q = quantized(x, torch.float8_e4m3fn)
        return q, q.float().sum(1)

    x = torch.randn(24, 64).bfloat16()
    q, total = Harness().run(function, x)
    torch.testing.assert_close(total, q.float().sum(1))


def test_products_that_are_summed_in_two_ways_share_no_tile(monkeypatch):
    def gated(x, w, v):
        return torch.sigmoid(x @ w) * (x @ v)

    ways = {}  # of GEMMs, as they are first asked about
    asked = lambda gemm: ways.setdefault(gemm, len(ways) % 2 == 0)  # noqa: E731
    monkeypatch.setattr("coda_inductor.fuse.pair.fast_accumulation", asked)
    harness = Harness()
    harness.run(gated, *(torch.randn(64, 64) for _ in range(3)))
    assert not any(site.program.paired for site in harness.fused)
