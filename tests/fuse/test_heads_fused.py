# SPDX-License-Identifier: Apache-2.0
"""Rotations of heads on the tile: what the exchange of columns goes through, what it does
not, and what becomes of a GEMM whose program with heads loses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn

from coda_inductor.refusal import refuse
from coda_inductor.select.choice import Choice
from coda_inductor.select.policy import Policy
from coda_inductor.semantic.rotary import rotate_heads

B, T, H, D, K = 2, 6, 3, 4, 10
N = H * D
SIGNS = torch.tensor([-1.0] * (D // 2) + [1.0] * (D // 2), dtype=torch.float64)


def turns(z, cos, sin):
    x = z.view(B, T, H, D).transpose(1, 2)
    return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin


def inputs(*more):
    return randn(B, T, K), randn(K, N), randn(T, D), randn(T, D), *more


def stops(harness):
    return {why.code for site in harness.report.sites for why in site.stops}


#: What stands between the product and the rotation, of a row, a column, a number.
BETWEEN = {
    "nothing": lambda z, row, col: z,
    "a bias": lambda z, row, col: z + row,
    "both, and an activation": lambda z, row, col: F.silu(z * col + row) * row - 2,
    "a condition": lambda z, row, col: torch.where(z > row, z, 0.5 * col),
    "an equal column": lambda z, row, col: torch.tanh(z) + row * row.exp(),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_an_exchange_goes_through_every_step(name):
    def function(x, w, cos, sin, row, col):
        return turns(BETWEEN[name](x @ w, row, col), cos, sin)

    harness = check(function, *inputs(randn(N), randn(B, T, 1)))
    assert harness.counts["rotary"] == 1
    (site,) = harness.fused
    assert site.program.head == D


def on_rows(z, cos, sin):
    """A rotation whose result stays in rows, as no model spells it."""
    cos, sin = cos[:, None], sin[:, None]
    even, odd = (t.expand(B, T, 1, D).reshape(-1, D) for t in (cos, sin * SIGNS))
    return rotate_heads(z, cos, sin, even, odd, D // 2, False, False, False, z.dtype)


def test_what_follows_a_rotation_is_absorbed_too():
    harness = check(lambda x, w, cos, sin: on_rows(x @ w, cos, sin) * 0.5, *inputs())
    (site,) = harness.fused
    assert site.absorbed == ("rotate_heads", "mul")


def test_who_reads_the_product_gets_it_too():
    def function(x, w, cos, sin):
        z = x @ w
        return turns(z, cos, sin), z.sum()

    harness = check(function, *inputs())
    (site,) = harness.fused
    assert len(site.program.stores) == 2


def test_a_tile_is_read_at_its_own_place_only():
    def function(x, w, cos, sin, tile):
        return turns(x @ w + tile, cos, sin)

    harness = check(function, *inputs(randn(B, T, N)))
    assert not harness.counts["rotary"]
    assert harness.counts["residual"] == 1
    assert "heads-tile" in stops(harness)


def test_what_is_rotated_twice_is_rotated_once():
    def function(x, w, cos, sin):
        return on_rows(on_rows(x @ w, cos, sin) * 2, sin, cos)

    harness = check(function, *inputs())
    (site,) = harness.fused
    assert site.absorbed == ("rotate_heads", "mul")
    assert "heads-tile" in stops(harness)


def test_heads_of_another_form_beside():
    def function(x, w, cos, sin):
        z = x @ w
        wide = z.view(B, T, 1, N).transpose(1, 2)
        many = torch.cat((cos, sin, cos), -1)
        other = wide * many + torch.cat((-wide[..., N // 2 :], wide[..., : N // 2]), -1) * many
        return turns(z, cos, sin), other

    harness = check(function, *inputs())
    assert harness.counts["rotary"] == 1
    assert "heads-kernel" in stops(harness)


def test_no_sums_behind_a_rotation():
    def function(x, w, cos, sin):
        z = on_rows(x @ w, cos, sin)
        return z, (z * z).sum(-1)

    harness = check(function, *inputs())
    (site,) = harness.fused
    assert "rotate_heads" in site.absorbed
    assert "heads-reduce" in stops(harness)


def test_no_rotation_behind_a_sum_with_a_tile():
    def function(x, w, cos, sin, tile):
        z = x @ w
        y = z * tile
        return y, (y * y).sum(-1), turns(z, cos, sin)

    harness = check(function, *inputs(randn(B, T, N)))
    kinds = [site.program.head and bool(site.program.reduces) for site in harness.fused]
    assert not any(kinds)


def test_tables_that_the_product_makes():
    """A table may depend on anything but its own GEMM."""

    def function(x, w, cos, sin):
        z = x @ w
        return turns(z, cos * z.sum(), sin)

    harness = check(function, *inputs())
    assert not harness.counts["rotary"]


def losing(what):
    """A policy that refuses programs as ``what`` says, and takes all others."""
    plain = Policy.judge

    def judge(self, site, a):
        if what(site.program):
            return Choice(refusal=refuse("gate-never", "it loses"), how="unfused")
        return plain(self, site, a)

    return judge


def test_a_rotation_that_loses_leaves_the_rest_fused(monkeypatch):
    def function(x, w, cos, sin, row):
        return turns((x @ w + row).relu(), cos, sin)

    monkeypatch.setattr(Policy, "judge", losing(lambda program: program.head))
    harness = check(function, *inputs(randn(N)))
    (site,) = harness.fused
    assert site.absorbed == ("add", "relu")
    assert "heads-apart" in stops(harness)
    assert not harness.counts["rotary"]
    assert not any("keep" in op for op in harness.ops())  # no tables for nobody
