# SPDX-License-Identifier: Apache-2.0
"""Rotations of heads on the tile: what the exchange of columns goes through, what it does
not, and what becomes of a GEMM whose program with heads loses."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn
from zoo.idioms import rotate_half

from coda_inductor.plan import Plan
from coda_inductor.refusal import refuse
from coda_inductor.select.choice import Choice
from coda_inductor.semantic.rotary import rotate_heads

B, T, H, D, K = 2, 6, 3, 4, 10
N = H * D
SIGNS = torch.tensor([-1.0] * (D // 2) + [1.0] * (D // 2), dtype=torch.float64)


def turns(z, cos, sin):
    x = z.view(B, T, H, D).transpose(1, 2)
    return x * cos + rotate_half(x) * sin


def inputs(*more):
    return randn(B, T, K), randn(K, N), randn(T, D), randn(T, D), *more


def stops(harness):
    return str([(why.code, why.text) for site in harness.report.sites for why in site.stops])


#: What stands between the product and the rotation, of a row, a column, a number.
BETWEEN = {
    "a bias": lambda z, row, col: z + row,
    "both, and an activation": lambda z, row, col: F.silu(z * col + row) * row - 2,
    "a condition": lambda z, row, col: torch.where(z > row, z, 0.5 * col),
    "an equal column": lambda z, row, col: torch.tanh(z) + row * row.exp(),
}


def test_an_exchange_goes_through_every_step():
    def function(x, ws, cos, sin, row, col):
        each = zip(BETWEEN.values(), ws, strict=True)
        return [turns(between(x @ w, row, col), cos, sin) for between, w in each]

    x, _, *tables = inputs(randn(N), randn(B, T, 1))
    harness = check(function, x, [randn(K, N) for _ in BETWEEN], *tables)
    assert harness.counts["rotary"] == len(BETWEEN)
    assert [site.program.head for site in harness.fused] == [D] * len(BETWEEN)


def on_rows(z, cos, sin):
    """A rotation whose result stays in rows, as no model spells it."""
    cos, sin = cos[:, None], sin[:, None]
    even, odd = (t.expand(B, T, 1, D).reshape(-1, D) for t in (cos, sin * SIGNS))
    return rotate_heads(z, cos, sin, even, odd, D // 2, False, False, False, z.dtype)


def test_what_follows_a_rotation_is_absorbed_and_who_reads_the_product_gets_it():
    def function(x, w, cos, sin):
        z = x @ w
        return on_rows(z, cos, sin) * 0.5, z.sum()

    harness = check(function, *inputs())
    (site,) = harness.fused
    assert site.absorbed == ("rotate_heads", "mul")
    assert len(site.program.stores) == 2


def of_another_form(x, w, cos, sin, _):
    z = x @ w
    wide, many = z.view(B, T, 1, N).transpose(1, 2), torch.cat((cos, sin, cos), -1)
    return turns(z, cos, sin), wide * many + rotate_half(wide) * many


#: Name -> function, how many rotations are on the tile, and why something else is not.
APART = {
    "on a tile": (lambda x, w, cos, sin, tile: turns(x @ w + tile, cos, sin), 0, "heads-tile"),
    "of a rotation": (
        lambda x, w, cos, sin, _: on_rows(on_rows(x @ w, cos, sin) * 2, sin, cos), 1, "heads-tile",
    ),
    "of another form": (of_another_form, 1, "heads of another form"),
    "summed": (
        lambda x, w, cos, sin, _: (z := on_rows(x @ w, cos, sin), (z * z).sum(-1)),
        1, "that rotate heads cannot reduce",
    ),
    "behind a sum with a tile": (
        lambda x, w, cos, sin, tile: (
            y := (z := x @ w) * tile, (y * y).sum(-1), turns(z, cos, sin)
        ), None, "",
    ),
    # A table may depend on anything but its own GEMM.
    "by what the product makes": (
        lambda x, w, cos, sin, _: turns(z := x @ w, cos * z.sum(), sin), 0, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "rotations", "why"), APART.values(), ids=APART)
def test_what_does_not_go_with_a_rotation_stays_apart(function, rotations, why):
    harness = check(function, *inputs(randn(B, T, N)))
    if rotations is not None:
        assert sum(site.absorbed.count("rotate_heads") for site in harness.fused) == rotations
    assert why in stops(harness)
    assert not any(site.program.head and site.program.reduces for site in harness.fused)


def test_a_rotation_that_loses_leaves_the_rest_fused(monkeypatch):
    def function(x, w, cos, sin, row):
        return turns((x @ w + row).relu(), cos, sin)

    judge, lost = Plan.judge, Choice(refusal=refuse("gate-never", "it loses"), how="unfused")
    monkeypatch.setattr(Plan, "judge", lambda *of: lost if of[1].program.head else judge(*of))
    harness = check(function, *inputs(randn(N)))
    (site,) = harness.fused
    assert site.absorbed == ("add", "relu")
    assert "its GEMM is fused without it" in stops(harness)
    assert not harness.counts["rotary"]
    assert not any("keep" in op for op in harness.ops())  # no tables for nobody
