# SPDX-License-Identifier: Apache-2.0
"""How many tensors an epilogue reads: what is too much for it stays outside, with the reason."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from checking import check, randn

from coda_inductor.fuse.operands import MAX_TILE_OPERANDS, MAX_VECTORS

M, K, N = 8, 16, 24


def added(x, w, *others):
    y = x @ w
    for other in others:
        y = y.sigmoid() * other  # in turn: a sum of them could be made elsewhere
    return y


def gated(x, gate, up, tile):
    return F.silu(x @ gate) * (x @ up) + tile


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("shape", "most"), [((M, N), MAX_TILE_OPERANDS), ((N,), MAX_TILE_OPERANDS + MAX_VECTORS)]
)
def test_the_one_too_many_stays(shape, most, more):
    harness = check(added, randn(M, K), randn(K, N), *(randn(*shape) for _ in range(most + more)))
    (site,) = harness.fused
    assert len(site.program.operands) == most
    assert ("epilogue-full" in [stop.code for stop in site.stops]) == bool(more)


def test_a_pair_reads_no_tile():
    harness = check(gated, randn(M, K), randn(K, N), randn(K, N), randn(M, N))
    (site,) = harness.fused
    assert site.program.paired
    assert not site.program.operands
    assert "paired-tile-operand" in [stop.code for stop in site.stops]
